from tests.runs import write_run as write_run
