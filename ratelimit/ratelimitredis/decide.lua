-- Decides about several calls, one after the other, as if each had come
-- alone. Each counter is read and written once.
-- KEYS: the counters. Each has the rule's number of window keys, starting with
-- window m0-1, or one key for a bucket.
-- ARGV[1]: a msgpack array of integers, because numbers as text cost as much as
-- the rest. The code addresses them by index. Computed values replace values
-- that are no longer needed, because a new table costs as much too:
--   the index of the first counter, the index of the first call;
--   from 3 on, per rule: kind (0 sliding, 1 fixed window, 2 bucket), window, max,
--     capacity (then times window), m0 (then the offset of the current window's
--     key from the first key), the number of windows declared beyond m0 + 1 (then
--     the part of the previous window that counts, in milliseconds);
--   per counter: its rule, or one that differs only in max, its first key (then
--     the key that counts), and three zeros (then previous, current before, current);
--   per call: take (1 or 0), within, number of charges, and per charge: its
--     rule, its counter, cost.
-- Returns the time and 1, or -1 if an m0 is wrong; then per call a verdict (1
-- admitted, 0 denied) and per charge the state before: the previous and current
-- counter, or 0 and the amount missing from the bucket.
local p = cmsgpack.unpack(ARGV[1])
local values = call('MGET', unpack(KEYS))
local counters, questions = p[1], p[2]
for r = 3, counters - 1, 6 do
  local w = p[r + 1]
  p[r + 3] = p[r + 3] * w
  if p[r] == 2 then
    p[r + 4] = 0
  else
    local m = floor(now / w)
    local d = m - p[r + 4]
    if d < 0 or d > p[r + 5] then return {now, -1} end
    p[r + 4], p[r + 5] = d + 1, p[r] == 0 and w - (now - m * w) or 0
  end
end

for c = counters, questions - 1, 5 do
  local r = p[c]
  local at = p[c + 1] + p[r + 4]
  local value = values[at]
  if p[r] == 2 then
    local ahead
    value, ahead = missing(value, p[r + 2])
    if ahead then keep(KEYS[at], value, p[r + 2]) end
  else
    value = count(value)
    p[c + 2] = count(values[at - 1])
  end
  p[c + 1], p[c + 3], p[c + 4] = at, value, value
end

local reply, n = {now, 1, 0, 0, 0}, 2 -- room for the shortest reply
local q, last = questions, #p
while q <= last do
  local take, within, stop, ok = p[q], p[q + 1], q + 3 * p[q + 2], 1
  n = n + 1
  local verdict = n
  for a = q + 3, stop, 3 do
    local r, c = p[a], p[a + 1]
    local w, prev, used = p[r + 1], p[c + 2], p[c + 4]
    reply[n + 1], reply[n + 2] = prev, used
    n = n + 2
    if p[r] == 2 then
      used = used - within * p[r + 2]
    else
      used = prev * p[r + 5] + used * w
    end
    if used + p[a + 2] * w > p[r + 3] then ok = 0 end
  end
  reply[verdict] = ok
  if ok == 1 and take == 1 then
    for a = q + 3, stop, 3 do
      local r, c, cost = p[a], p[a + 1], p[a + 2]
      if p[r] == 2 then cost = cost * p[r + 1] end
      p[c + 4] = p[c + 4] + cost
    end
  end
  q = stop + 3
end

for c = counters, questions - 1, 5 do
  local r, before, cur = p[c], p[c + 3], p[c + 4]
  local added = cur - before
  if added ~= 0 then
    local name, w = KEYS[p[c + 1]], p[r + 1]
    if added == 1 then added = '1' end -- a number would be printed with 17 digits
    if p[r] == 2 then
      keep(name, cur, p[r + 2])
    elseif before == 0 or type(redis.pcall('INCRBY', name, added)) == 'table' then
      call('SET', name, cur, 'PX', 2 * w - now % w + 1000) -- new, or not a plain number
    end
  end
end
return reply
