"""Other people's servers: which URLs and addresses we go to, and how a connection is made.

===============  =====================================================
``url``          URLs as users write them: which we accept, what of them may be shown
``address``      the guard, which judges the very address that is connected to
``session``      an aiohttp session that follows, remembers and unpacks nothing by itself
``retry_after``  how long a server asks to be left alone
===============  =====================================================
"""
