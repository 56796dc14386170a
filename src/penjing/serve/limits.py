"""The limits of requests and connections."""

MAX_BODY_BYTES = 4 << 20
BODY_BYTES = 512 << 10  # of any request: tools, a schema
BODY_BYTES_PER_TOKEN = 1024  # of the longest context: 128 prompts of ids, or one of \u escapes
MAX_VALUES = 65_536  # strings, lists, objects and commas of a body: to build so many takes up to 30 ms
MAX_PROMPT_VALUES = 524_288  # of a body with prompts of ids
MAX_HEADER_BYTES = 64 << 10
MAX_ANSWERS = 128  # of one request: prompts x n
MAX_N = 16
MAX_STOP, MAX_STOP_CHARACTERS = 16, 256
MAX_LOGIT_BIAS = 1024
MAX_TOOLS = 128
MAX_MESSAGES = 4096
MAX_PARTS = 1024  # of one message
MAX_SCHEMA_CHARACTERS = 65_536
MAX_WAITING = 256  # waiting answers of all models and clients; one client may have half of all places
# At once; running and waiting, of all clients; of one client, which has one running.
TOOL_PLACES = 4, 32, 8
GRAMMAR_PLACES = 2, 128, 64
TRIM_BYTES = 256 << 10  # memory of bodies above this is returned, as of large grammars
TRIM_SECONDS = 1.0  # after such a request
RETRY_SECONDS = 1  # Retry-After for a rejected client
READ_SECONDS = 10.0  # for a request to arrive: its headers, and then its body
SEND_SECONDS = 30.0  # for a client to take what was sent to it
REQUEST_SECONDS = 600.0  # for a whole answer, waiting included
DRAIN_SECONDS = 30.0  # for running requests after SIGTERM
MAX_CONNECTIONS = 4096
CONNECTIONS_AT_ONCE = 128  # accepted in one iteration of asyncio's event loop; uvloop accepts one
# Tokens that come shortly after one another are sent in one chunk: a chunk of any size costs about 0.1 ms.
CHUNKS_PER_SECOND = 400  # of all streams together
LONGEST_PAUSE = 0.05  # seconds: 20 chunks a second look smooth
STEP_PAUSE = 0.01  # seconds: a burst of requests delays a step of the engine by this at most
BURST_REQUESTS, BURST_SECONDS = 32, 0.02  # so many requests within so many seconds are a burst
ITERATIONS_PER_REQUEST = 3  # of the event loop: accept, make the connection, read
MAX_BEGIN_WAITS = 200  # of an answer, for other requests
