-- Decides a request of one limiter or of several, all or none; or takes its charges back, or deletes the states.
--
-- KEYS: for each limiter the key of its state; then, with a request id, the key of its mark.
-- ARGV: the operation (hit, peek, cancel, refund or reset); for how many microseconds to keep a mark, or 0 for none;
-- then for each limiter its algorithm's name and arguments.
-- Reply to hit and peek: 1 allowed, 0 denied, 2 charged before; the time; then for each limiter 1 or 0, whether it
-- allows the request, and the numbers of its algorithm's `report`.
-- Reply to the others: 1 done, or 0 if the request's mark is missing; and the time.
-- Reply to any: -1 and the index of a key that holds a foreign value.
local what, ttl = ARGV[1], tonumber(ARGV[2])
local now, count, mark, was_marked = clock(), #KEYS, nil, false
if ttl > 0 then
  mark = KEYS[count]
  count = count - 1
  local value = reply_of('GET', mark)
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
  -- Limiters that share a state decide one after the other.
  local states, reports, allowed = {}, {}, true
  for i, part in ipairs(parts) do
    local algorithm, a, key = part[1], part[2], part[3]
    local state = states[key] or algorithm.read(key, now, a)
    if not state then
      return {-1, i}
    end
    states[key], part[4] = state, state
    local ok = algorithm.allows(state, now, a)
    part[5] = ok
    reports[i] = {unpack(algorithm.report(state, now, a, ok, key))}
    allowed = allowed and ok
    if allowed and what == 'hit' and not was_marked and a[1] > 0 then
      algorithm.charge(state, now, a)
      -- A cancellation finds the charge by the state right after it, even if the next limiter shares the state.
      part[6] = {unpack(algorithm.report(state, now, a, true, key))}
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
      reports[i] = part[6]
    end
    answer[#answer + 1] = ok and 1 or 0
    for _, number in ipairs(reports[i]) do
      answer[#answer + 1] = number
    end
  end
  if charges and mark then
    redis.call('SET', mark, 'r', 'PXAT', expiry(now + ttl))
  end
  return answer
end

-- All states are read before the first changes, so that a foreign value under one key leaves the others unchanged.
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
-- In reverse order: several limiters may have charged one state.
for i = #parts, 1, -1 do
  local algorithm, a, key = parts[i][1], parts[i][2], parts[i][3]
  if what == 'reset' then
    redis.call('UNLINK', key)
  else
    algorithm.give_back(key, algorithm.read(key, now, a), now, a, what == 'cancel')
  end
end
return {1, now}
