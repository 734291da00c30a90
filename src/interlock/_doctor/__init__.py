"""What endangers locks on some servers: facts that the servers tell, and what follows from them.

For `interlock doctor` and the live page. No decision of the protocol reads it.
"""
