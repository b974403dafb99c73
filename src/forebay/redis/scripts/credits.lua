-- Credits: the state is the permits that a key has left. No time changes it, so its Redis key has no TTL.
algorithms.credits = {
  -- amount, room
  arguments = 2,
  read = function(key)
    return read_text(key, '^c(%d+)$', {0})
  end,
  allows = function(state, now, a)
    return a[1] <= state[1]
  end,
  charge = function(state, now, a)
    state[1] = state[1] - a[1]
  end,
  report = function(state)
    return state
  end,
  left = function(state)
    return state[1]
  end,
  add = function(state, now, a, permits)
    state[1] = state[1] + permits
  end,
  write = function(key, state)
    if state[1] > 0 then
      redis.call('SET', key, 'c' .. text(state[1]))
    else
      redis.call('UNLINK', key)
    end
  end,
  give_back = function(key, state, now, a)
    state[1] = math.min(state[1] + a[1], 281474976710655) -- as many as `add` gives
    algorithms.credits.write(key, state)
  end,
}
