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
    local whole, rest = scaled(permits, a[5], a[4])
    return rest > 0 and whole + 1 or whole
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
