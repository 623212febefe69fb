DROP FUNCTION {{write}};
