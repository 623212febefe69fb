DROP FUNCTION {{claim}}, {{settle}}, {{record}}, {{look}};
