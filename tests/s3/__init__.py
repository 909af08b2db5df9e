"""Real S3-API servers for tests, and a proxy before them that makes trouble."""

from tests.s3.proxy import FaultyProxy
from tests.s3.servers import JuiceFSServer, MotoServer, S3Server, s3_server_of_kind

__all__ = ["FaultyProxy", "JuiceFSServer", "MotoServer", "S3Server", "s3_server_of_kind"]
