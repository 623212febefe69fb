DROP TABLE holdfast_process;
DROP TABLE holdfast_history;
