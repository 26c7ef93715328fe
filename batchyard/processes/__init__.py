"""Work of one process and of its children: threads, turns, and programs that end with us.

===================  ====================================================================
``child_program``    a Python program of ours with limits; ``child_loop`` is its side
``guarded_process``  any command that ends with us; the process ``guardian`` ensures that
``orphan``           how a process ends when its parent has
``threads``          blocking calls, and the rule about cancelling them
``in_order``         coroutines that run at once, with their results in order
``tenant_turns``     how much costly work runs at once, and which tenant is next
``machine``          which machine this process is on
===================  ====================================================================
"""
