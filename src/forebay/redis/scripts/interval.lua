-- Token bucket with interval refill, at every whole period. The state is a period's number and the permits that are
-- missing in that period.
local function missing_of(period, missing, now, a)
  if missing == 0 then
    return 0
  end
  return math.max(missing - (math.floor(now / a[6]) - period) * a[5], 0)
end

local function write_interval(key, missing, now, a)
  local period = math.floor(now / a[6])
  write_text(key, 'i' .. text(period) .. ':' .. text(missing), (period + math.ceil(missing / a[5])) * a[6], now)
end

algorithms.interval = {
  arguments = 6, -- amount, room, patience, burst, limit, period; in a cancellation: amount, period, missing, ...
  read = function(key, now, a)
    local state = read_text(key, '^i(%d+):(%d+)$', {0, 0})
    -- No limiter writes a period so far ahead, or so many missing permits.
    if state and (state[1] > (now + 2251799813685248) / a[6] or state[2] > 4503599627370496) then
      return nil
    end
    return state
  end,
  allows = function(state, now, a)
    local missing = missing_of(state[1], state[2], now, a) + a[1]
    if missing <= a[4] then
      return true
    end
    local refills = math.ceil((missing - a[4]) / a[5])
    return refills * a[6] - now % a[6] <= a[3]
  end,
  left = function(state, now, a)
    return a[4] - missing_of(state[1], state[2], now, a)
  end,
  charge = function(state, now, a)
    state[2] = missing_of(state[1], state[2], now, a) + a[1]
    state[1] = math.floor(now / a[6])
  end,
  report = function(state)
    return state
  end,
  write = function(key, state, now, a)
    write_interval(key, state[2], now, a)
  end,
  give_back = function(key, state, now, a, is_cancelled)
    local missing, amount = missing_of(state[1], state[2], now, a), a[1]
    if is_cancelled then
      -- Later bookings keep their times.
      if missing > a[4] and not (state[1] == a[2] and state[2] == a[3]) then
        return
      end
      -- The rest of the charge has been refilled.
      amount = math.min(amount, missing_of(a[2], a[3], now, a))
    end
    amount = math.min(amount, missing)
    if amount > 0 then
      write_interval(key, missing - amount, now, a)
    end
  end,
}
