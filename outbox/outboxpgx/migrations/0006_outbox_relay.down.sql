DROP FUNCTION {{claim}}, {{settle}}, {{look}};
