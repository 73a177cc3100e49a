"""The dashboard: a web front of its own (`xmig-web`), which shows what xmigd's REST API gives its visitor.

It has no authority of its own: every request that it makes carries the visitor's token. Nothing is kept here but
sessions in memory.
"""
