-- The keys of some hot lists: see sync.lua.
--
-- KEYS: the lists. ARGV: for each, the version that the host has read; 0 for none.
-- Reply: 1; the time; then for each list its version (0 if there is none), the number of keys that follow, and the name
-- and the sum of each. No keys follow if the host has read this version. Or -1 and the index of a key that holds a
-- foreign value.
local answer = {1, clock()}
for i, list in ipairs(KEYS) do
  local first = reply_of('ZRANGE', list, 0, 0, 'WITHSCORES')
  if not first then
    return {-1, i}
  end
  local version = first[2] and -first[2] or 0
  table.insert(answer, version)
  if version == tonumber(ARGV[i]) then
    table.insert(answer, 0)
  else
    local found = redis.call('ZRANGE', list, 1, -1, 'WITHSCORES')
    table.insert(answer, #found / 2)
    for j = 1, #found, 2 do
      table.insert(answer, found[j])
      table.insert(answer, tonumber(found[j + 1]))
    end
  end
end
return answer
