-- What a host has counted in one window of a key, or in two.
--
-- KEYS: a hash for each window. ARGV: the host, the key's birth there, when this was read, and how long a window is; then
-- for each window what was counted, or -1 to tell nothing; what of it was known here once; what others had counted, as far
-- as the host has heard; and when it ends. It is taken from a whole window before it begins, and kept for as many windows
-- after its end as it counts for: so long for hosts whose clocks are fast or late.
-- The answer: 1 and the time; then for each window the sum of all hosts, what is known of this one, and how that is to be
-- taken; or -1, 0 and OVER or FAR. Or -1 and the number of a key that holds something else.
local AS_IT_IS, OVER, LOST, FULL, FAR = 0, 1, 2, 3, 4
local host, birth, read_at, period = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local now, windows = clock(), {}
for i, key in ipairs(KEYS) do
  windows[i] = read_told(key, host, birth)
  if not windows[i] then
    return {-1, i}
  end
end

local answer = {1, now}
for i, key in ipairs(KEYS) do
  local told, first = windows[i], 4 * i + 1
  local used, believed = tonumber(ARGV[first]), tonumber(ARGV[first + 1])
  local others, ends = tonumber(ARGV[first + 2]), tonumber(ARGV[first + 3])
  local until_us = ends + #KEYS * period
  if until_us <= now or ends - 2 * period > now then
    table.insert(answer, -1)
    table.insert(answer, 0)
    table.insert(answer, until_us <= now and OVER or FAR)
  else
    local taken = AS_IT_IS
    if told.is_new and believed > 0 or others > told.most then
      -- Others will tell again, too, but not at once.
      told.is_lost = true
      redis.call('HSET', key, 'lost', '1')
      redis.call('PEXPIREAT', key, expiry(until_us))
    end
    if told.is_lost then
      taken = LOST
    end
    if used >= 0 and read_at > told.read then
      if has_room(key, told) then
        -- Of another birth, what was told before stays in the sum.
        told.sum = math.max(told.sum + used - (told.known or 0), 0)
        told.known = used
        write_told(key, told, host, read_at, birth, used, now, until_us)
        if told.sum > told.most then
          redis.call('HSET', key, 'most', text(told.sum))
        end
      else
        -- Whoever made room would be counted again with its next message.
        taken = FULL
      end
    end
    table.insert(answer, told.sum)
    table.insert(answer, told.known or 0)
    table.insert(answer, taken)
  end
end
return answer
