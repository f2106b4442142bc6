"""A control plane whose clients a test can close. Not a test."""

from typing import Any

from kclrun.aws.control import ControlPlane
from kclrun.aws.endpoints import EndpointSettings, open_session
from kclrun.model.wire import WireCredentials
from tests.patience import HUNG_S


class HeldPlane(ControlPlane):
    """Remembers its clients, so that the test can close them."""

    def __init__(self, url: str) -> None:
        settings = EndpointSettings(region="eu-west-1", endpoint_url=url, read_timeout_s=HUNG_S)
        super().__init__(open_session(settings), settings, WireCredentials("a", "b"))
        self.made: list[Any] = []

    def _client(self, service: str, attempts: int) -> Any:
        self.made.append(super()._client(service, attempts))
        return self.made[-1]

    def close(self) -> None:
        for client in self.made:
            client.close()
