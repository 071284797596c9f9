"""Services that network rules name, and a sandbox's rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .._models import SandboxInfo, items, sub, text
from .._networks import Endpoint, NetworkStatus, Service, endpoint_messages, network_status, rules_message, service_of
from .api import Api

PAGE = 1000


class Services:
    """What network rules may name: ``DSecClient.services``. The whole platform has the same; administrators change them."""

    def __init__(self, api: Api) -> None:
        self._api = api

    async def put(
        self, name: str, endpoints: Iterable[Endpoint], *, description: str = "", create_only: bool = False
    ) -> Service:
        """Define a service, in place of what its name stood for.

        Running sandboxes keep what their rules stood for.

        Args:
            name: lower-case letters, digits and ``-``, at most 63, a letter first.
            endpoints: for example ``["pypi.org:443", "10.0.0.0/8:8000-8010", "ns.example.org:53/udp"]``.
            description: for people.
            create_only: the name must stand for nothing yet.

        Returns:
            The service as it is now.

        Raises:
            PermissionDeniedError: the key is no administrator's of the root project.
            InvalidArgumentError: also of what nothing may open (``network_rule_forbidden``).
            AlreadyExistsError: with ``create_only`` (``service_exists``).
        """
        service = {"name": name, "endpoints": endpoint_messages(endpoints), "description": description}
        answer = await self._call("PutService", {"service": service, "createOnly": create_only}, once=create_only)
        return service_of(sub(answer, "service"))

    async def get(self, name: str) -> Service:
        """Return a service.

        Raises:
            NotFoundError: there is none of this name (``service_not_found``).
        """
        return service_of(sub(await self._call("GetService", {"name": name}), "service"))

    async def list(self) -> list[Service]:
        """Return all services, by name."""
        found: list[Service] = []
        token = ""
        while True:
            answer = await self._call("ListServices", {"pageSize": PAGE, "pageToken": token})
            found += [service_of(sub({"": s}, "")) for s in items(answer, "services")]
            token = text(answer, "nextPageToken")
            if not token:
                return found

    async def remove(self, name: str) -> None:
        """Remove a service. Sandboxes whose rules name it keep what it stood for.

        Raises:
            NotFoundError: there is none of this name (``service_not_found``).
        """
        await self._call("RemoveService", {"name": name})

    async def _call(self, method: str, message: dict[str, Any], *, once: bool = False) -> dict[str, Any]:
        return await self._api.call(method, message, service="NetworkService", once=once)


class Networking:
    """The part of ``Sandbox`` that says what it may reach."""

    _api: Api
    info: SandboxInfo

    @property
    def id(self) -> str:
        """Its name for ever."""
        raise NotImplementedError

    async def set_network(self, rules: Mapping[str, bool]) -> None:
        """Replace the sandbox's network rules, in one step: there is no moment with other ones than the old or the new.

        Open connections to what they close are reset; others go on. If the call fails, the old rules are in force; after
        UnavailableError or DSecTimeoutError it is either these or the new ones.

        Args:
            rules: all of them, as ``DSecContainerRunArgs.network_rules``: what is not named is closed.

        Raises:
            InvalidArgumentError: a rule cannot be read, needs what nothing may open, or is denied by others altogether.
            NotFoundError: there is no such service (``unknown_network_service``).
            FailedPreconditionError: a host cannot be found (``network_name_unresolved``).
        """
        answer = await self._api.call("SetNetwork", {"sandboxId": self.id, "networkRules": rules_message(rules)})
        self.info = SandboxInfo.from_wire(sub(answer, "sandbox"))

    async def network(self) -> NetworkStatus:
        """Return what the rules mean now, and what was refused. To look at it is no activity of the sandbox."""
        return network_status(sub(await self._api.call("GetNetwork", {"sandboxId": self.id}), "network"))
