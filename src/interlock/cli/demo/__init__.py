"""`interlock demo`: scenarios in which processes contend, under each well-known recipe, on a real server.

    commands           `interlock demo sale`, `interlock demo semaphore`
    flash_sale         the scenario of the lock, with lock_recipes
    api_limit          the scenario of the semaphore, with semaphore_recipes
    scenario           what both share: clients, faults, results
    runner             runs a scenario under each recipe and prints the table
    processes, worker  the processes in which the clients run

Each worker process imports this package, so this module imports nothing.
"""
