"""Rules that change while the application runs.

`sources` say where the document is. The `loader` of the host, whom an `election` finds, reads it again and again.
`standing` says what becomes of the keys' state when a limit changes, and `carrying` does that. A `publication` gives
every process the document of a version. `live_rules` makes rules of it for the gates of one process.
"""

from forebay.rules.live.live_rules import LiveRules
from forebay.rules.live.loader import LiveStatus
from forebay.rules.live.sources import FileSource, RedisSource, Source, SqlSource

__all__ = ["FileSource", "LiveRules", "LiveStatus", "RedisSource", "Source", "SqlSource"]
