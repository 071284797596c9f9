"""What tests/sio uses of libdsec."""

from libdsec._sync.api import Api
from libdsec._sync.http import HttpClient
from libdsec.sync import Command, DSecClient, FileReader, Sandbox, Session, Terminal

__all__ = ["Api", "Command", "DSecClient", "FileReader", "HttpClient", "Sandbox", "Session", "Terminal"]
