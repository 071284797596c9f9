"""The version, once."""

VERSION = "0.1.0"
USER_AGENT = f"libdsec/{VERSION}"
