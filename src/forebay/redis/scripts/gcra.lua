-- The generic cell rate algorithm. The state is the theoretical arrival time.
algorithms.gcra = {
  arguments = 3, -- amount, room, due: so far ahead of now, everybody who booked may have gone
  read = function(key)
    return read_text(key, '^t(%d+)$', {0})
  end,
  allows = function(state, now, a)
    return math.max(state[1], now) - now <= a[2]
  end,
  charge = function(state, now, a)
    state[1] = math.max(state[1], now) + a[1]
  end,
  tell = function(state)
    return state
  end,
  write = function(key, state, now)
    write_text(key, 't' .. text(state[1]), state[1], now)
  end,
  give_back = function(key, state, now, a, is_cancelled)
    local amount, charged = a[1], a[2]
    if is_cancelled then
      -- Others have booked behind it, and keep their times: its own can't be given to anybody.
      if charged ~= state[1] and state[1] - now > a[3] then
        return
      end
      -- The rest has been refilled.
      amount = math.min(amount, charged - now)
    end
    if state[1] > now and amount > 0 then
      state[1] = state[1] - amount
      algorithms.gcra.write(key, state, now)
    end
  end,
}
