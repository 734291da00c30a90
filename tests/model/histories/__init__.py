"""Random histories on real servers: real processes use locks while faults strike, and a checker reads what they wrote.

Theory. A *worker process* runs a few threads, or tasks of one event loop. Each of them goes for locks at random, and
inside a section calls `ensure()` again and again. Before each call the worker reads a clock that all processes of one
machine share; when the call passed, the worker appends that reading to a file of its own. So the file proves, whatever
happens to the process later, that the process believed in its lease from the first of these readings to the last one.
The *controller* starts the servers and the workers, lets faults strike, heals everything, drains the workers, and looks
at what is left in the servers. The *checker* is a set of pure functions over the lines of all files.

    lines.py     one line is one event: how workers write them and the checker reads them
    checker.py   what must hold in a history
    settings.py  what one history is made of; every choice comes from its seed
    worker.py    the program of a worker process
    hookless.py  the same, if worker processes are forked without Python's hooks
    rigs.py      the servers: single, sentinel, cluster, quorum
    store.py     the data beside the locks, into which sections write with their fences
    faults.py    the faults, each a function with a name
    phases.py    the phases: scenes between the random faults, each directed at one promise
    late.py      how long processes waited for a processor
    history.py   the controller: one history from the start of the servers to the verdict
    cli.py       scripts/histories
    plants.py    broken clients: the tests plant one, and the checker must report it
"""
