-- What a host has counted in one window of a key, or in two.
--
-- KEYS: a hash for each window. ARGV: the host, the key's birth there, when this was read; then for each window what was
-- counted, or -1 to tell nothing, and until when the window is kept.
-- The answer: 1 and the time; then for each window the sum of all hosts and what is known of this one, or -1 twice if the
-- window is over. Or -1 and the number of a key that holds something else.
local host, birth, read_at = ARGV[1], ARGV[2], tonumber(ARGV[3])
local now, windows = clock(), {}
for i, key in ipairs(KEYS) do
  windows[i] = read_told(key, '^(%d+)$', host, birth)
  if not windows[i] then
    return {-1, i}
  end
end

local answer = {1, now}
for i, key in ipairs(KEYS) do
  local told, used, until_us = windows[i], tonumber(ARGV[2 + 2 * i]), tonumber(ARGV[3 + 2 * i])
  if until_us <= now then
    answer[1 + 2 * i], answer[2 + 2 * i] = -1, -1
  else
    if used >= 0 and read_at >= told.read then
      -- Of another birth, what was told before stays in the sum.
      told.sum = told.sum + used - (told.known or 0)
      told.known = used
      write_told(key, told, host, read_at, birth, used, now, until_us)
    end
    answer[1 + 2 * i], answer[2 + 2 * i] = told.sum, told.known or 0
  end
end
return answer
