-- The time in microseconds since 1970, by the clock of this server. The only place that asks for it.
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- The millisecond of Redis, as text, before which a state that counts until then must not vanish.
local function expiry(until_us)
  return string.format('%.0f', math.ceil(until_us / 1000))
end
