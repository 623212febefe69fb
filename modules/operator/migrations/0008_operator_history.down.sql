DROP TABLE holdfast_history;
