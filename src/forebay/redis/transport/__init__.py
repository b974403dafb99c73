"""How calls reach Redis: one server, a master of sentinels, or a cluster; with deadlines and a circuit breaker."""
