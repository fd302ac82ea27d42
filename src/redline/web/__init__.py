"""The page in the browser: watch runs, play yourself, send replays.

A server process reads run folders and sends what changed to its viewers. A second process, the player, plays games with
the newest weights and hands frames to the server. Training knows neither of them. No module here names a game: boards are
drawn from `cells` and PALETTE, everything else from rendered frames.
"""
