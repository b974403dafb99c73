"""The ground floor: a segment's file and its bytes. Nothing here knows a limiter."""
