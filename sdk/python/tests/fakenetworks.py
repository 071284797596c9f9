"""The part of the platform in miniature that knows services and network rules."""

from __future__ import annotations

from typing import Any

from fakehttp import ApiError, not_found

Services = dict[str, dict[str, Any]]


def put(services: Services, m: dict[str, Any]) -> dict[str, Any]:
    s = m["service"]
    if m.get("createOnly") and s["name"] in services:
        raise ApiError(409, "already_exists", "there is such a service", "service_exists")
    services[s["name"]] = {**s, "changedAt": "2026-01-01T00:00:00Z", "changedBy": "ann"}
    return {"service": services[s["name"]]}


def find(services: Services, name: str) -> dict[str, Any]:
    if name not in services:
        raise not_found("service")
    return services[name]


def page(services: Services, m: dict[str, Any]) -> dict[str, Any]:
    """One service a page."""
    names = sorted(n for n in services if n > m.get("pageToken", ""))
    more = names[0] if len(names) > 1 else ""
    return {"services": [services[n] for n in names[:1]], "nextPageToken": more}


def status(spec: dict[str, Any]) -> dict[str, Any]:
    endpoint = {"host": "10.1.0.0/16", "port": 443, "lastPort": 443, "protocol": "tcp"}
    rules = [{"rule": r, "allowed": a, "endpoints": [endpoint]} for r, a in sorted(spec.get("networkRules", {}).items())]
    refused = {"destination": "10.9.9.9", "port": 80, "protocol": "tcp", "reason": "not_allowed", "packets": "7"}
    return {
        "rules": rules,
        "addresses": ["198.18.0.4"],
        "connections": "2",
        "refusedPackets": "9",
        "refused": [{**refused, "lastAt": "2026-01-01T00:00:00Z"}],
    }
