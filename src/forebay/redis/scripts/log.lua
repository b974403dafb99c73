-- Sliding log. The state is a sorted set of admissions by their dates. A member holds the running total of permits up
-- to and including it, and its own permits. So the permits between two members are a subtraction, and an admission is
-- one member at any cost.
local function admission(key, rank)
  local found = redis.call('ZRANGE', key, rank, rank, 'WITHSCORES')
  local parts = numbers(found[1], '^p(%d+):(%d+)$')
  return tonumber(found[2]), parts[1], parts[2]
end

-- The rank of the first admission whose running total is at least `total`. There must be one.
local function first_with(key, total)
  local low, high = 0, redis.call('ZCARD', key) - 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    local _, after = admission(key, middle)
    if after >= total then
      high = middle
    else
      low = middle + 1
    end
  end
  return low
end

local function member(after, permits)
  -- The length is fixed, as Redis orders members of one date by their text.
  return 'p' .. string.format('%016.0f', after) .. ':' .. text(permits)
end

-- Rebases the running totals, which only grow, long before one could be too large for a double.
local function begin_again(key, before)
  local found = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  for i = 1, #found, 2 do
    local parts = numbers(found[i], '^p(%d+):(%d+)$')
    if parts then
      redis.call('ZADD', key, found[i + 1], member(parts[1] - before, parts[2]))
      redis.call('ZREM', key, found[i])
    end
  end
end

algorithms.log = {
  arguments = 3, -- amount, room, period
  read = function(key, now, a)
    local newest = reply_of('ZREVRANGE', key, 0, 0, 'WITHSCORES')
    local state = {date = 0, after = 0, before = 0, stored = 0, charged = {}}
    if not newest then
      return nil
    elseif #newest > 0 then
      local parts = numbers(newest[1], '^p(%d+):(%d+)$')
      state.date = tonumber(newest[2])
      if not parts or not is_time(state.date) then
        return nil
      end
      state.past = math.max(now, state.date)
      local first = redis.call(
        'ZRANGEBYSCORE', key, '(' .. text(state.past - a[3]), '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
      if #first > 0 then
        local oldest = numbers(first[1], '^p(%d+):(%d+)$')
        if not oldest then
          return nil
        end
        state.after, state.before, state.stored = parts[1], oldest[1] - oldest[2], parts[1]
      end
    end
    state.past = math.max(now, state.date)
    return state
  end,
  allows = function(state, now, a)
    return state.after - state.before <= a[2]
  end,
  left = function(state, now, a)
    return a[1] + a[2] - (state.after - state.before)
  end,
  charge = function(state, now, a)
    state.date = state.past
    state.after = state.after + a[1]
    state.charged[#state.charged + 1] = {state.after, a[1]}
  end,
  -- The newest date, the permits in the window, and when this request would be allowed.
  report = function(state, now, a, ok, key)
    local used, retry_at = state.after - state.before, 0
    if not ok then
      local leaving = state.before + used - a[2]
      -- The same request may have charged this state for another limiter. Then no stored admission may suffice.
      retry_at = state.date + a[3]
      if leaving <= state.stored then
        retry_at = admission(key, first_with(key, leaving)) + a[3]
      end
    end
    return {state.date, used, retry_at}
  end,
  write = function(key, state, now, a)
    -- Writes that need memory come first: a server without memory refuses a script only before its first write.
    for _, charged in ipairs(state.charged) do
      redis.call('ZADD', key, text(state.date), member(charged[1], charged[2]))
    end
    redis.call('ZREMRANGEBYSCORE', key, '-inf', text(state.past - a[3]))
    redis.call('PEXPIREAT', key, expiry(state.date + a[3]))
    if state.after >= 4503599627370496 then
      begin_again(key, state.before)
    end
  end,
  -- Takes back the oldest admissions in the window. So the remaining dates are never earlier than those of the
  -- admissions that were not refunded, and no permit leaves the window too early.
  give_back = function(key, state, now, a, is_cancelled)
    local used = state.after - state.before
    if used == 0 or is_cancelled and a[2] + a[3] <= now then
      return
    end
    if a[1] >= used then
      redis.call('UNLINK', key)
      return
    end
    local total = state.before + a[1]
    local rank = first_with(key, total)
    local date, after = admission(key, rank)
    redis.call('ZREMRANGEBYRANK', key, 0, rank)
    if after > total then
      redis.call('ZADD', key, text(date), member(after, after - total))
      -- If this was the only member, its removal deleted the key and the expiry.
      redis.call('PEXPIREAT', key, expiry(state.date + a[3]))
    end
  end,
}
