-- A request of one limiter or of several, all or none.
--
-- KEYS: a state's key for each limiter, and with a request id that of its mark.
-- ARGV: what is asked; for how many microseconds a mark is kept, or 0 for none; then for each limiter the name of its
-- algorithm and the algorithm's arguments.
-- The answer: 1 allowed, 0 denied, 2 charged before, -1 and the number of a key that holds something else; the time; then
-- for each limiter 1 or 0, whether it allows the request, and what its algorithm tells.
local what, ttl = ARGV[1], tonumber(ARGV[2])
local now, count, mark, was_marked = clock(), #KEYS, nil, false
if ttl > 0 then
  mark = KEYS[count]
  count = count - 1
  local value = ask('GET', mark)
  if value == nil or value and value ~= 'r' then
    return {-1, count + 1}
  end
  was_marked = value ~= false
end

local parts, at = {}, 3
for i = 1, count do
  local algorithm, a = algorithms[ARGV[at]], {}
  for j = 1, algorithm.arguments do
    a[j] = tonumber(ARGV[at + j]) or ARGV[at + j]
  end
  at = at + algorithm.arguments + 1
  parts[i] = {algorithm, a, KEYS[i]}
end

if what == 'hit' or what == 'peek' then
  -- Limiters that share a state are judged one after the other.
  local states, told, allowed = {}, {}, true
  for i, part in ipairs(parts) do
    local algorithm, a, key = part[1], part[2], part[3]
    local state = states[key] or algorithm.read(key, now, a)
    if not state then
      return {-1, i}
    end
    states[key], part[4] = state, state
    local ok = algorithm.allows(state, now, a)
    part[5] = ok
    told[i] = {unpack(algorithm.tell(state, now, a, ok, key))}
    allowed = allowed and ok
    if allowed and what == 'hit' and not was_marked and a[1] > 0 then
      algorithm.charge(state, now, a)
      -- As its own charge has left it: by that it is cancelled, also if the next limiter has the same state.
      part[6] = {unpack(algorithm.tell(state, now, a, true, key))}
    end
  end
  local charges = allowed and what == 'hit' and not was_marked
  local answer = {was_marked and 2 or allowed and 1 or 0, now}
  for i, part in ipairs(parts) do
    local algorithm, a, key, state, ok = part[1], part[2], part[3], part[4], part[5]
    if charges and part[6] then
      if states[key] then
        algorithm.write(key, state, now, a)
        states[key] = nil
      end
      told[i] = part[6]
    end
    answer[#answer + 1] = ok and 1 or 0
    for _, number in ipairs(told[i]) do
      answer[#answer + 1] = number
    end
  end
  if charges and mark then
    redis.call('SET', mark, 'r', 'PXAT', expiry(now + ttl))
  end
  return answer
end

-- All are read before one is changed, so that something else under a key leaves the others as they were.
for i, part in ipairs(parts) do
  if not part[1].read(part[3], now, part[2]) then
    return {-1, i}
  end
end
if mark then
  if not was_marked then
    return {0, now}
  end
  redis.call('UNLINK', mark)
end
-- The last one first: several may be charged in one state.
for i = #parts, 1, -1 do
  local algorithm, a, key = parts[i][1], parts[i][2], parts[i][3]
  if what == 'reset' then
    redis.call('UNLINK', key)
  else
    algorithm.give_back(key, algorithm.read(key, now, a), now, a, what == 'cancel')
  end
end
return {1, now}
