"""An engine in a process of its own, and what stands for it in the process that asks.

`RemoteEngine` has the methods of `Engine`; `worker` runs the engine. Both have a `Peer`, which
carries all that has gathered as one message.
"""
