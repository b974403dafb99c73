-- The generic cell rate algorithm. The state is the theoretical arrival time.
algorithms.gcra = {
  arguments = 3, -- amount, room, due: a TAT at most so far ahead of now has no booking that is still waiting
  read = function(key)
    return read_text(key, '^t(%d+)$', {0})
  end,
  allows = function(state, now, a)
    return math.max(state[1], now) - now <= a[2]
  end,
  charge = function(state, now, a)
    state[1] = math.max(state[1], now) + a[1]
  end,
  report = function(state)
    return state
  end,
  -- Here the fourth and fifth argument are the rate: so many permits, per so much time.
  left = function(state, now, a)
    local left = a[1] + a[2] - math.max(state[1] - now, 0)
    return left > 0 and (scaled(left, a[4], a[5])) or 0
  end,
  amount = function(permits, a)
    return scaled_up(permits, a[5], a[4])
  end,
  convert = function(state, now, a, keep, old, limit)
    local ahead, tolerance, most = state[1] - now, a[1] + a[2], 2251799813685248
    if ahead <= 0 then
      return false
    end
    local function later(value, by, divisor)
      return value * by / divisor < most and scaled_up(value, by, divisor) or most
    end
    if keep == 'share' then
      ahead = later(ahead, tolerance, old.tolerance)
    elseif keep == 'used' then
      ahead = later(later(ahead, old.permits, old.period), a[5], a[4])
    elseif ahead > old.tolerance then
      -- Booked ahead.
      ahead = math.min(tolerance + later(later(ahead - old.tolerance, old.permits, old.period), a[5], a[4]), most)
    else
      local left = math.min((scaled(old.tolerance - ahead, old.permits, old.period)), limit)
      ahead = tolerance - math.min(scaled_up(left, a[5], a[4]), tolerance)
    end
    state[1] = now + ahead
    return true
  end,
  write = function(key, state, now)
    write_text(key, 't' .. text(state[1]), state[1], now)
  end,
  give_back = function(key, state, now, a, is_cancelled)
    local amount, charged = a[1], a[2]
    if is_cancelled then
      -- Later bookings keep their times, so no request can use the cancelled one's.
      if charged ~= state[1] and state[1] - now > a[3] then
        return
      end
      -- The rest of the charge has been refilled.
      amount = math.min(amount, charged - now)
    end
    if state[1] > now and amount > 0 then
      state[1] = state[1] - amount
      algorithms.gcra.write(key, state, now)
    end
  end,
}
