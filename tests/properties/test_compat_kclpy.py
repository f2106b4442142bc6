"""Any properties file of the MultiLangDaemon is converted to settings that hold, or refused."""

from hypothesis import given
from hypothesis import strategies as st

from kclrun.compat.kclpy.app_yaml import Script, app_yaml
from kclrun.compat.kclpy.property_table import known_properties, read_properties
from kclrun.config.load import settings_of
from kclrun.errors import SettingsError
from tests.examples import examples
from tests.unit.compat.test_kclpy_properties import BASE, NOW

NAMES = st.sampled_from([each.name for each in known_properties()])


VALUES = st.one_of(
    st.text(max_size=30),
    st.integers().map(str),
    st.sampled_from(["true", "LATEST", "FANOUT", "a|arn:aws:iam::123456789012:role/x", "x,y"]),
)


@examples(200)
@given(st.dictionaries(NAMES | st.text(max_size=12), VALUES, max_size=12), st.text(max_size=20))
def test_whatever_the_properties_say_the_file_is_accepted_or_refused_with_a_reason(
    properties, argument
):
    script = Script("consumer.py", argument or None, (argument,), argument)

    try:
        text = app_yaml(BASE | properties, script, "app.properties", NOW)
    except SettingsError:
        return

    assert settings_of(text, environment={}, now=NOW).options == {"arguments": [argument]}


@given(st.text())
def test_any_text_is_read_or_refused_with_a_reason(text):
    try:
        read = read_properties(text)
    except SettingsError:
        return

    assert all(isinstance(each, str) for pair in read.items() for each in pair)
