-- The time in microseconds since 1970, by this server's clock. No other function reads it.
local function clock()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- The expiry, in milliseconds and as text, of a state that counts until `until_us`. Rounded up: never too early.
local function expiry(until_us)
  return string.format('%.0f', math.ceil(until_us / 1000))
end
