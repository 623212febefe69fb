DROP TABLE {{parked}};
