-- Concurrency. The state is a sorted set of the held permits, by the ends of their leases.
algorithms.concurrency = {
  arguments = 4, -- amount, room, lease, and a name for the permits: h and unique hexadecimal digits
  read = function(key, now)
    local last = reply_of('ZREVRANGE', key, 0, 0, 'WITHSCORES')
    local state = {last_end = 0, used = 0, taken = {}}
    if not last then
      return nil
    elseif #last > 0 then
      state.last_end = tonumber(last[2])
      if not string.match(last[1], '^h%x+:%d+$') or not is_time(state.last_end) then
        return nil
      end
      state.used = redis.call('ZCOUNT', key, '(' .. text(now), '+inf')
    end
    return state
  end,
  allows = function(state, now, a)
    return state.used <= a[2]
  end,
  charge = function(state, now, a)
    state.used = state.used + a[1]
    state.last_end = math.max(state.last_end, now + a[3])
    state.taken[#state.taken + 1] = a
  end,
  -- The held permits, when enough leases have ended for this request, and when all have.
  report = function(state, now, a, ok, key)
    local retry_at = 0
    if not ok then
      local ending = redis.call(
        'ZRANGEBYSCORE', key, '(' .. text(now), '+inf', 'WITHSCORES', 'LIMIT', text(state.used - a[2] - 1), 1)
      retry_at = tonumber(ending[2] or state.last_end)
    end
    return {state.used, retry_at, state.used > 0 and state.last_end or 0}
  end,
  write = function(key, state, now)
    -- Writes that need memory come first: a server without memory refuses a script only before its first write.
    for _, a in ipairs(state.taken) do
      local ends = text(now + a[3])
      for i = 1, a[1] do
        redis.call('ZADD', key, ends, a[4] .. ':' .. text(i))
      end
    end
    redis.call('ZREMRANGEBYSCORE', key, '-inf', text(now))
    redis.call('PEXPIREAT', key, expiry(state.last_end))
  end,
}
