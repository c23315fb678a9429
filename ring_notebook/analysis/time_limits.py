"""How long a job, a rank, a host and a run may take, and when users learn of it, in seconds.

What a user may set otherwise is in `config.py`.
"""

# Of a job:
LINGER = 1.0  # for ranks to end with errors of their own after one has failed; none after one was killed
ABORTED = 3.0  # instead, after a rank that another one has aborted: that one has yet to exit, and is to be named
GRACE = 5.0  # between SIGTERM and SIGKILL; and before SIGTERM if an elastic job cannot continue, or under a launcher
RAISED = 5.0  # for the exit handlers of a failed rank; MPI's waits for all ranks
STOPPING = 10.0  # for ranks to end after a signal: for a checkpoint, or a timeline
WARN_STOPPING = 1.0  # until the user learns of that wait; most jobs end sooner and need no message
SAME_SIGNAL = 0.5  # within which a second signal counts as the first one: `timeout` signals us and our group
# Of a site's launcher:
WARN_START = 30.0  # until the user learns that ranks are missing: a host that does not answer, a queue
START_LIMIT = 600.0  # to start all ranks; `Config.start_limit` may set another
OUTLIVING = 30.0  # to end after its last rank
# Of a rank that no supervisor watches:
RENDEZVOUS_LIMIT = 120.0  # for the other ranks to come to the rendezvous; the same
# Of another host:
SECONDS_OF_SSH = 20.0  # to connect to a host, which may be down; less than the next, which counts from the same moment
SECONDS_TO_CONNECT = 30.0  # for the remote shell to connect, and for the agent to answer; the same
SECONDS_TO_BE_ASSIGNED = 60.0  # for the supervisor to say what an agent has to run
SILENCE = 30.0  # without a sign of life until agent and supervisor give each other up; each sends six in that time
SECONDS_TO_HANG_UP = 2.0  # for a remote shell that has closed its output to exit
LOST_LINK = SILENCE + 5.0  # to learn what became of a host, after a rank has lost its link to a rank there
# Of a batch job:
WALLTIME_WARNING = 300.0  # before its end, until which users can still save
# Of a notebook's engines and runs:
REGISTERING = 120.0  # for engines to start, and to register with the controller; the same
SECONDS_TO_EXPLAIN = 2.0  # for the supervisor to say how an engine has ended
ABORTING = 0.3  # for the other ranks to abort after the first failure, before they are interrupted
ENDING = 0.8  # for them to stop
UNHEARD = 5.0  # instead, if a rank waits in code that ignores signals: then it is ended, if it can start again
DYING = 3.0  # instead, if all ranks report that a rank has left: it may have died, which MPI reports a moment later
REPORTING = 10.0  # from the answer of an engine to the record of how its rank ended, on another connection
RAISING = 0.5  # instead, if the engine has answered with an error of its own: usually no record follows
TELLING = 20.0  # instead, if the controller has lost engines: over several hosts the death is reported late
