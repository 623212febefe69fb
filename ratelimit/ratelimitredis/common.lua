-- Shared by the other scripts. Numbers are exact integers below 2^53.
local t = redis.call('TIME')
local now = t[1] * 1000 + math.floor(t[2] / 1000)
local limit53 = 9007199254740992

-- count reads a counter; what is no number counts nothing.
local function count(v)
  local n = v and tonumber(v)
  if not n or not (n > 0) then return 0 end
  return math.min(math.floor(n), limit53)
end

-- missing reads a bucket "missing:since" and brings it forward to now.
local function missing(v, max)
  local used, since = string.match(v or '', '^(%d+):(%d+)$')
  if not used then return 0 end
  local elapsed = math.max(0, now - tonumber(since))
  return math.max(0, math.min(tonumber(used), limit53) - elapsed * max)
end

local function keep(key, used, max)
  redis.call('SET', key, string.format('%.0f:%.0f', used, now), 'PX', math.ceil(used / max) + 1000)
end
