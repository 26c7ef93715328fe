"""Servers of other people: which URLs and addresses are allowed, and how to connect.

===============  =====================================================
``url``          URLs of users: which are accepted, and which parts may be shown
``address``      the guard, which checks the very address that is connected to
``resolve``      whether a URL leads to refused addresses only, found out before it is used
``lookup``       names, looked up in threads of their own; ``resolver``: for aiohttp
``authorities``  which certificate authorities are trusted
``session``      an aiohttp session without redirects, cookies or decompression
``csrf``         the token that a Prefect server wants with every change
``retry_after``  how long a server asks us to wait
===============  =====================================================
"""
