"""The Helm chart: rendered by Helm's own engine, checked against the schemas of Kubernetes."""

import os

import pytest
import yaml

from tests.deploy.facts import DEPLOY, KILL_AFTER_S, PROGRAM, STATE_DIR, USER, settings_by
from tests.deploy.test_dockerfile import STAGES, of

# In the locked environment for development; on aarch64 there is no Helm as a package.
helm = pytest.importorskip("helm_python.chart")
schemas = pytest.importorskip("kubernetes_validate")

CHART = DEPLOY / "helm"
PLAIN = DEPLOY / "kubernetes.yaml"
IMAGE = {"image": "registry.example/shop:1"}
ZONES = ["eu-west-1a", "eu-west-1b", "eu-west-1c"]
EVERYTHING = IMAGE | {
    "zones": ZONES,
    "roleArn": "arn:aws:iam::111122223333:role/shop",
    "settings": {"leases.max": 32, "aws.region": "eu-west-1", "options": {"a": ["b c"]}},
    "environment": [{"name": "STAGE", "value": "prod"}],
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"kubernetes.io/arch": "arm64"},
    "tolerations": [{"operator": "Exists"}],
    "autoscaling": {"by": "hpa", "min": 4, "max": 7},
}
HEADER = """# The chart in helm/ with its defaults, for  kubectl apply -f  after a change of names,
# image and resources. Made by  KCLRUN_GOLDEN=write pytest tests/deploy/test_kubernetes.py
"""


def rendered(values):
    with helm.Chart.load(CHART) as chart:
        return chart.render(values, name="shop")


def objects(values):
    found = [each for text in rendered(values).values() for each in yaml.safe_load_all(text)]
    return [each for each in found if each]


def of_kind(kind, values):
    return [each for each in objects(values) if each["kind"] == kind]


def container(deployment):
    [found] = deployment["spec"]["template"]["spec"]["containers"]
    return found


def words(deployment):
    """kclrun's command line, as Kubernetes makes it."""
    found = container(deployment)
    zone = next(each for each in found["env"] if each["name"] == "ZONE").get("value", "")
    return [PROGRAM[0], *(each.replace("$(ZONE)", zone) for each in found["args"])]


def test_helms_own_linter_has_nothing_to_warn_of():
    report = helm.lint(CHART, IMAGE, strict=True)

    assert report["errors"] == []
    assert [each for each in report["messages"] if each["severity"] > 1] == []


@pytest.mark.parametrize("version", ["1.27", "1.35", "1.37"])
@pytest.mark.parametrize("values", [IMAGE, EVERYTHING], ids=["defaults", "everything"])
def test_kubernetes_takes_every_object(values, version):
    for each in objects(values):
        schemas.validate(each, version, strict=True)


def test_a_field_that_kubernetes_does_not_have_would_be_found():
    [deployment] = of_kind("Deployment", IMAGE)
    deployment["spec"]["template"]["spec"]["gracePeriod"] = 1

    with pytest.raises(schemas.ValidationError):
        schemas.validate(deployment, "1.35", strict=True)


def test_the_plain_manifests_are_the_chart_with_its_defaults():
    parts = [
        text.strip().removeprefix("---").strip() for _, text in sorted(rendered(IMAGE).items())
    ]
    text = HEADER + "".join(f"---\n{part.strip()}\n" for part in parts if part)
    if os.environ.get("KCLRUN_GOLDEN") == "write":
        PLAIN.write_text(text)

    assert PLAIN.read_text() == text
    assert len(list(yaml.safe_load_all(text))) == len(objects(IMAGE)) == 3


@pytest.mark.parametrize("values", [IMAGE, EVERYTHING], ids=["defaults", "everything"])
def test_kclrun_takes_its_command_line_and_has_time_to_drain(values):
    for deployment in of_kind("Deployment", values):
        given = words(deployment)
        found = settings_by(given)
        pod = deployment["spec"]["template"]["spec"]

        assert given[: len(PROGRAM)] == PROGRAM
        assert pod["terminationGracePeriodSeconds"] == found.shutdown.grace + KILL_AFTER_S
        port = container(deployment)["ports"][0]
        assert str(found.observe.listen) == f"0.0.0.0:{port['containerPort']}"
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container(deployment)[probe]["httpGet"]
            assert asked == {"path": "/health", "port": port["name"]}


def test_the_settings_of_the_values_are_those_of_kclrun():
    found = settings_by(words(of_kind("Deployment", EVERYTHING)[0]))

    assert (found.leases.max, found.aws.region) == (32, "eu-west-1")
    assert found.options == {"a": ["b c"]}


def test_a_stream_of_the_values_is_read_in_place_of_those_of_the_file():
    arn = "arn:aws:dynamodb:eu-west-1:111122223333:table/orders/stream/2026-01-01T00:00:00.000"
    values = IMAGE | {"stream": arn}
    found = settings_by(words(of_kind("Deployment", values)[0]))

    assert [each.name for each in found.sources] == [arn]
    for each in objects(values):
        schemas.validate(each, "1.37", strict=True)


def test_a_pod_is_as_the_image_says_and_writes_only_where_a_volume_is():
    [deployment] = of_kind("Deployment", IMAGE)
    pod = deployment["spec"]["template"]["spec"]
    security = pod["securityContext"]
    mounts = {each["mountPath"] for each in container(deployment)["volumeMounts"]}

    assert f"{security['runAsUser']}:{security['runAsGroup']}" == USER
    assert security["runAsNonRoot"]
    assert container(deployment)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    # P3: lock files are of one pod, and outlive its container.
    assert any(STATE_DIR.startswith(f"{mount}/") for mount in mounts)
    assert [each["emptyDir"] for each in pod["volumes"]] == [{}, {}]
    assert set(of(STAGES[1], "WORKDIR")) <= mounts


def test_the_group_is_the_zone_of_the_node_or_of_the_deployment():
    [one] = of_kind("Deployment", IMAGE)
    [zone, *_] = container(one)["env"]
    assert zone["valueFrom"]["fieldRef"]["fieldPath"] == (
        "metadata.labels['topology.kubernetes.io/zone']"
    )
    assert settings_by(words(one)).leases.group == ""

    for name, each in zip(ZONES, of_kind("Deployment", EVERYTHING), strict=True):
        assert settings_by(words(each)).leases.group == name
        selector = each["spec"]["template"]["spec"]["nodeSelector"]
        assert selector["topology.kubernetes.io/zone"] == name
        # No Deployment counts the pods of another one as its own.
        assert each["spec"]["selector"]["matchLabels"]["kclrun/zone"] == name


def test_a_disruption_takes_one_pod_of_the_fleet_at_a_time():
    [budget] = of_kind("PodDisruptionBudget", EVERYTHING)

    assert budget["spec"]["maxUnavailable"] == 1
    for each in of_kind("Deployment", EVERYTHING):
        labels = each["spec"]["template"]["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize("zones", [[], ZONES])
def test_the_scalers_together_make_as_many_pods_as_are_needed(zones):
    scaling = {"min": 3, "max": 9}
    by_hpa = of_kind(
        "HorizontalPodAutoscaler", IMAGE | {"zones": zones, "autoscaling": scaling | {"by": "hpa"}}
    )
    by_keda = of_kind(
        "ScaledObject", IMAGE | {"zones": zones, "autoscaling": scaling | {"by": "keda"}}
    )
    share = len(zones) or 1

    assert len(by_hpa) == len(by_keda) == share
    for each in by_hpa:
        [metric] = each["spec"]["metrics"]
        assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": str(share)}
        assert (each["spec"]["minReplicas"], each["spec"]["maxReplicas"]) == (3 / share, 9 / share)
    for each in by_keda:
        [trigger] = each["spec"]["triggers"]
        assert (trigger["metricType"], trigger["metadata"]["threshold"]) == (
            "AverageValue",
            str(share),
        )
        assert trigger["metadata"]["query"] == "avg(kclrun_needed_workers)"
        assert each["spec"]["minReplicaCount"] == 3 / share
    # A scaler and a number of replicas would undo each other.
    scaled = of_kind("Deployment", IMAGE | {"autoscaling": {"by": "hpa"}})
    assert all("replicas" not in each["spec"] for each in scaled)


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "your application's image"),
        (IMAGE | {"autoscaling": {"by": "cpu"}}, "none, keda or hpa"),
    ],
)
def test_values_that_cannot_work_are_refused(values, why):
    with pytest.raises(Exception, match=why):
        rendered(values)
