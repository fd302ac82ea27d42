"""The page in the browser: watch runs, play games yourself, send replays.

A server process reads run folders and sends changes to its viewers. A second process, the player, plays games with the
newest weights and passes frames to the server. Training is aware of neither. No module here depends on a specific game: boards
are drawn from `cells` and PALETTE, everything else from rendered frames.
"""
