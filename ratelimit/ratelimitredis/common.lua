-- Shared by the other scripts. Numbers are exact integers below 2^53.
local call, floor = redis.call, math.floor
local t = call('TIME')
local now = t[1] * 1000 + floor(t[2] / 1000)
local limit53 = 9007199254740992

-- count reads a counter; a value that is not a number counts as 0.
local function count(v)
  local n = v and tonumber(v)
  if not n or not (n > 0) then return 0 end
  if n > limit53 then return limit53 end
  return floor(n)
end

-- missing reads a bucket "missing:since" and brings it forward to now. If the
-- clock was set back in the meantime, the bucket is unchanged, and the second
-- result tells the caller to store it, so that it regains from now on.
local function missing(v, max)
  local used, since = string.match(v or '', '^(%d+):(%d+)$')
  if not used then return 0, false end
  local elapsed = now - since
  return math.max(0, math.min(used + 0, limit53) - math.max(0, elapsed) * max), elapsed < 0
end

local function keep(key, used, max)
  call('SET', key, string.format('%.0f:%.0f', used, now), 'PX', math.ceil(used / max) + 1000)
end
