"""What tests/aio uses of libdsec; for the generated tests/sio it is libdsec_sync_api."""

from libdsec import Command, DSecClient, FileReader, Sandbox, Session, Terminal
from libdsec._async.api import Api
from libdsec._async.http import HttpClient

__all__ = ["Api", "Command", "DSecClient", "FileReader", "HttpClient", "Sandbox", "Session", "Terminal"]
