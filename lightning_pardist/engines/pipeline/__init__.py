"""Pipeline parallelism by stage replay: every stage runs the user's own step, with other stages' modules as stubs."""
