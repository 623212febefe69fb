DROP TABLE {{waiting}};
DROP TABLE {{stopped}};
