/* The native job core of an EMQ node: thirteen write verbs and EMQ.VERSION, one loadable module.
 *
 * It holds the flat life of a job (pending, active, scheduled, dead) on Valkey 8 and 9 and on Redis 7:
 *
 *     emq:{q}:pending  emq:{q}:active  emq:{q}:schedule  emq:{q}:dead     sorted sets of job ids
 *     emq:{q}:job:<id>                                                    the row, a hash
 *     emq:{q}:meta  emq:{q}:metrics:completed  emq:{q}:metrics:failed     hashes
 *
 * How it is made, top to bottom:
 *
 *     server interface    the few dozen functions of the module API, declared here and fetched when loaded
 *     verbs and calls     what a verb's description says, and the state of one call
 *     replies             numbers, refusals; foreign bytes are escaped before they enter an error
 *     rows and sets       reads
 *     effects             writes; each one changes the data and tells replicas and AOF the same bytes
 *     accepting a call    arity, keys, base, arguments, key types, all from the verb's description
 *     the verbs           the rules, one function a verb
 *     the table           one row a verb: it registers the commands, and EMQ.VERSION reads its tokens
 *     loading
 *
 * Two rules hold everywhere. A verb looks at everything that it is going to touch before its first write, so
 * a refusal has written nothing. And nobody but this process ever reads its clock: replicas and AOF get
 * effects (ZADD, ZREM, HSET, HDEL, DEL), never a verb.
 *
 * A note for who writes ACL rules: the sweeps, CLAIM and EXTENDS find rows by id, and COMPLETE, FAIL and
 * STALLED.CHECK write metrics; the server cannot check those names against a user's key patterns. They always
 * begin with the base, so grant the verbs with the pattern of the whole queue (`~emq:{q}:*`), not key by key. */

#include <errno.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

/* ---------------------------------------------------------------- server interface */

typedef struct RedisModuleCtx Ctx;
typedef struct RedisModuleString Str;
typedef struct RedisModuleKey Key;
typedef struct RedisModuleCommand Command;
typedef struct RedisModuleServerInfoData ServerInfo;
typedef struct RedisModuleCallReply CallReply;
typedef int (*Entry)(Ctx *ctx, Str **argv, int argc);

enum { OK = 0, ERR = 1, API_VERSION = 1 };
enum { KEY_READ = 1 << 0, KEY_WRITE = 1 << 1 };
enum { TYPE_NONE = 0, TYPE_HASH = 3, TYPE_ZSET = 5 };
enum { HASH_NONE = 0, HASH_EXISTS = 1 << 3 };
enum { NOTIFY_GENERIC = 1 << 2, NOTIFY_HASH = 1 << 6, NOTIFY_ZSET = 1 << 7 };
enum {
    OPTION_NO_IMPLICIT_SIGNAL_MODIFIED = 1 << 1,
    OPTION_HANDLE_REPL_ASYNC_LOAD = 1 << 2,
    OPTION_SKIP_COMMAND_VALIDATION = 1 << 4,      /* Valkey */
    OPTION_HANDLE_ATOMIC_SLOT_MIGRATION = 1 << 5, /* Valkey */
};
#define HASH_DELETE ((Str *)(intptr_t)1) /* the server's marker: delete this field */

enum { /* what a command does with a key */
    KEY_RO = 1 << 0,
    KEY_RW = 1 << 1,
    KEY_ACCESS = 1 << 4,
    KEY_UPDATE = 1 << 5,
    KEY_INSERT = 1 << 6,
    KEY_DELETE = 1 << 7,
    KEY_VARIABLE_FLAGS = 1 << 10,
};
enum { SEARCH_BY_INDEX = 2, FIND_BY_KEYNUM = 3 };
enum { ARG_STRING = 0, ARG_INTEGER = 1, ARG_KEY = 3, ARG_PURE_TOKEN = 6, ARG_ONEOF = 7, ARG_BLOCK = 8 };
enum { ARG_OPTIONAL = 1 << 0, ARG_MULTIPLE = 1 << 1 };

typedef struct ArgDoc {
    const char *name;
    int type;
    int key_spec_index;
    const char *token;
    const char *summary;
    const char *since;
    int flags;
    const char *deprecated_since;
    struct ArgDoc *subargs;
    const char *display_text;
} ArgDoc;

typedef struct {
    const char *since;
    const char *changes;
} HistoryDoc;

typedef struct {
    const char *notes;
    uint64_t flags;
    int begin_search_type;
    union {
        struct { int pos; } index;
        struct { const char *keyword; int startfrom; } keyword;
    } bs;
    int find_keys_type;
    union {
        struct { int lastkey, keystep, limit; } range;
        struct { int keynumidx, firstkey, keystep; } keynum;
    } fk;
} KeySpec;

typedef struct {
    int version;
    size_t sizeof_history, sizeof_keyspec, sizeof_arg;
} CommandDocVersion;

typedef struct {
    const CommandDocVersion *version;
    const char *summary;
    const char *complexity;
    const char *since;
    HistoryDoc *history;
    const char *tips;
    int arity;
    KeySpec *key_specs;
    ArgDoc *args;
} CommandDoc;

/* Functions that every supported server has. */
#define REQUIRED_API(F)                                                                     \
    F(int, SetModuleAttribs, (Ctx *, const char *name, int version, int api_version))       \
    F(int, IsModuleNameBusy, (const char *name))                                            \
    F(void, SetModuleOptions, (Ctx *, int options))                                         \
    F(void, Log, (Ctx *, const char *level, const char *format, ...))                       \
    F(int, CreateCommand, (Ctx *, const char *name, Entry, const char *flags, int, int, int)) \
    F(int, IsKeysPositionRequest, (Ctx *))                                                  \
    F(void, KeyAtPos, (Ctx *, int position))                                                \
    F(ServerInfo *, GetServerInfo, (Ctx *, const char *section))                            \
    F(Str *, ServerInfoGetField, (Ctx *, ServerInfo *, const char *field))                  \
    F(void, FreeServerInfo, (Ctx *, ServerInfo *))                                          \
    F(void *, Realloc, (void *, size_t))                                                    \
    F(void, Free, (void *))                                                                 \
    F(long long, Milliseconds, (void))                                                      \
    F(Str *, CreateString, (Ctx *, const char *, size_t))                                   \
    F(Str *, CreateStringFromLongLong, (Ctx *, long long))                                  \
    F(void, RetainString, (Ctx *, Str *))                                                   \
    F(void, FreeString, (Ctx *, Str *))                                                     \
    F(const char *, StringPtrLen, (const Str *, size_t *))                                  \
    F(int, StringToLongLong, (const Str *, long long *))                                    \
    F(Key *, OpenKey, (Ctx *, Str *, int mode))                                             \
    F(void, CloseKey, (Key *))                                                              \
    F(int, KeyType, (Key *))                                                                \
    F(int, DeleteKey, (Key *))                                                              \
    F(int, HashGet, (Key *, int flags, ...))                                                \
    F(int, HashSet, (Key *, int flags, ...))                                                \
    F(int, ZsetAdd, (Key *, double score, Str *, int *flags))                               \
    F(int, ZsetRem, (Key *, Str *, int *deleted))                                           \
    F(int, ZsetFirstInScoreRange, (Key *, double min, double max, int minex, int maxex))    \
    F(int, ZsetRangeEndReached, (Key *))                                                    \
    F(int, ZsetRangeNext, (Key *))                                                          \
    F(Str *, ZsetRangeCurrentElement, (Key *, double *score))                               \
    F(void, ZsetRangeStop, (Key *))                                                         \
    F(CallReply *, Call, (Ctx *, const char *command, const char *format, ...))             \
    F(void, FreeCallReply, (CallReply *))                                                   \
    F(int, Replicate, (Ctx *, const char *command, const char *format, ...))                \
    F(int, SignalModifiedKey, (Ctx *, Str *name))                                           \
    F(int, NotifyKeyspaceEvent, (Ctx *, int type, const char *event, Str *name))            \
    F(int, WrongArity, (Ctx *))                                                             \
    F(int, ReplyWithError, (Ctx *, const char *))                                           \
    F(int, ReplyWithLongLong, (Ctx *, long long))                                           \
    F(int, ReplyWithNull, (Ctx *))                                                          \
    F(int, ReplyWithArray, (Ctx *, long))                                                   \
    F(int, ReplyWithString, (Ctx *, Str *))                                                 \
    F(int, ReplyWithStringBuffer, (Ctx *, const char *, size_t))

/* Functions that an older server may lack; NULL there. */
#define OPTIONAL_API(F)                                                                     \
    F(void, KeyAtPosWithFlags, (Ctx *, int position, int flags))                            \
    F(Command *, GetCommand, (Ctx *, const char *name))                                     \
    F(int, SetCommandInfo, (Command *, const CommandDoc *))                                 \
    F(int, SetCommandACLCategories, (Command *, const char *categories))

#define DECLARE(result, name, parameters) static result(*RM_##name) parameters;
REQUIRED_API(DECLARE)
OPTIONAL_API(DECLARE)

/* ---------------------------------------------------------------- verbs and calls */

/* Where a job can be. The order is that of the two lists of names below it. */
typedef enum { PENDING, ACTIVE, SCHEDULE, DEAD, PLACES } Place;
static const char *const set_name[PLACES] = {"pending", "active", "schedule", "dead"};

/* Texts that are used as row fields or values: made into a server string when a call first needs one. */
typedef enum {
    W_STATE_PENDING, W_STATE_ACTIVE, W_STATE_SCHEDULED, W_STATE_DEAD, /* by Place */
    W_STATE, W_PAYLOAD, W_ATTEMPTS, W_FAILURES, W_STALLED, W_LEASE_EPOCH, W_LAST_ERROR, W_GROUP, W_PARENT,
    W_PAUSED, W_COUNT, W_ZERO, W_RUN_ID, WORDS
} Word;

static char run_id[64]; /* this server process; read once, when loaded */

static const char *const word_text[WORDS] = {
    "pending", "active", "scheduled", "dead",
    "state", "payload", "attempts", "failures", "stalled", "lease_epoch", "last_error", "group", "parent",
    "paused", "count", "0", run_id,
};

/* What stands at a position of a verb's keys. The first four are the sets of Place. */
typedef enum { K_PENDING, K_ACTIVE, K_SCHEDULE, K_DEAD, K_ROW, K_BASE } KeyRole;

typedef struct {
    KeyRole role;
    int flags;
} KeyUse;

/* A verb's plain arguments. */
typedef enum {
    A_END, A_ID, A_TOKEN, A_PAYLOAD, A_ERROR, A_WHEN, A_DUE_MS, A_LEASE_MS, A_DELAY_MS, A_MAX_ATTEMPTS, A_MAX_STALLED,
    A_LIMIT, A_BASE, A_PAIRS, ARGS
} Arg;

static const char *const arg_name[ARGS] = {
    "", "id", "token", "payload", "error", "when", "ms", "lease_ms", "delay_ms", "max_attempts", "max_stalled",
    "limit", "base", "id token",
};

enum { MAX_KEYS = 4, MAX_ARGS = 6 }; /* FAIL has the most of both */

/* A derived hash that a verb reads or writes beside its keys. */
typedef enum { NO_SIDE, SIDE_META, SIDE_COMPLETED, SIDE_FAILED } Side;
static const char *const side_name[] = {"", "meta", "metrics:completed", "metrics:failed"};

typedef struct Call Call;

typedef struct {
    const char *name;
    const char *tokens; /* what EMQ.VERSION says of this verb; NULL for EMQ.VERSION itself */
    bool (*body)(Call *); /* answers; false: it refused, and wrote nothing */
    Entry entry;
    const char *flags;
    const char *summary;
    const char *complexity;
    Side side;
    int nkeys; /* K_BASE included */
    KeyUse keys[MAX_KEYS];
    int nargs; /* A_PAIRS excluded */
    Arg args[MAX_ARGS + 1];
} Verb;

/* What becomes of a job that a verb found. */
typedef enum {
    GHOST = 0,                /* no row: leaves the set, goes nowhere */
    LEAVE = 1 << 0,           /* stays as it is */
    MOVE = 1 << 1,
    RECOVER = 1 << 2,         /* to pending; the expiry crossed a restart */
    RECOVER_COUNTED = 1 << 3, /* to pending; a stall within the budget */
    BURY = 1 << 4,            /* to dead; a stall that spent the budget */
} Fate;

typedef struct {
    Str *id;
    Str *name; /* of the row's key */
    Key *row;
    Fate fate;
    long long stalled; /* the counter before this stall check */
} Job;

typedef struct {
    int type;
    const char *event;
    Str *name;
} Touch;

/* Arrays that grow with the limit. They outlive the call in `spare`: with the C library's allocator, large blocks that
 * come and go with each sweep make all the small ones slower (a sixth of a sweep's time). */
typedef enum { B_JOBS, B_TOUCHED, B_VECTOR, B_NAME, BUFFERS } BufferUse;

typedef struct {
    void *at;
    size_t bytes;
} Buffer;

static Buffer spare[BUFFERS];
static const size_t SPARE_BYTES = 1 << 20; /* a limit of some 20,000; what is larger is given back */

struct Call {
    const Verb *verb;
    Ctx *ctx;
    Str **argv;
    int argc;
    long long now; /* server clock, ms, one reading a call */

    const char *base; /* emq:{q}: as it lies in an argument, or in front of a set's name */
    size_t base_len;
    Str *set_key[PLACES];
    Key *set[PLACES];
    Job job; /* of the verbs that name one row; its strings belong to the caller */
    Str *side_key;
    Key *side;

    Str *token, *payload, *error;
    long long due; /* lease deadline or due time, ms */
    long long budget, limit;
    int first_pair;

    Job *jobs; /* found or named ids; strings and keys are ours */
    size_t njobs;
    Touch *touched; /* keys written, for WATCH, client caches and keyspace events */
    size_t ntouched;
    Str *word[WORDS];
    Buffer buffer[BUFFERS];
};

/* A clock value beyond this is not exact in a sorted set's score (a double). */
static const long long MAX_MS = (1LL << 53) - 1;

static Str *word(Call *c, Word w) {
    if (!c->word[w]) c->word[w] = RM_CreateString(c->ctx, word_text[w], strlen(word_text[w]));
    return c->word[w];
}

/* The server's allocator aborts rather than answer NULL. */
static void *room_for(Call *c, BufferUse use, size_t bytes) {
    Buffer *b = &c->buffer[use];
    if (bytes > b->bytes) {
        b->bytes = bytes > 2 * b->bytes ? bytes : 2 * b->bytes;
        b->at = RM_Realloc(b->at, b->bytes);
    }
    return b->at;
}

/* A call borrows the spare buffers. They are gone for a call inside it, which a keyspace event could cause. */
static void borrow_buffers(Call *c) {
    memcpy(c->buffer, spare, sizeof spare);
    memset(spare, 0, sizeof spare);
}

static void return_buffers(Call *c) {
    for (int i = 0; i < BUFFERS; i++) {
        if (spare[i].at || c->buffer[i].bytes > SPARE_BYTES)
            RM_Free(c->buffer[i].at);
        else
            spare[i] = c->buffer[i];
    }
}

/* A key of this queue: base, a fixed part, and an id or nothing. */
static Str *queue_key(Call *c, const char *fixed, const Str *id) {
    size_t fixed_len = strlen(fixed), id_len = 0;
    const char *id_text = id ? RM_StringPtrLen(id, &id_len) : "";
    size_t len = c->base_len + fixed_len + id_len;
    char *name = room_for(c, B_NAME, len);
    memcpy(name, c->base, c->base_len);
    memcpy(name + c->base_len, fixed, fixed_len);
    memcpy(name + c->base_len + fixed_len, id_text, id_len);
    return RM_CreateString(c->ctx, name, len);
}

static Job *add_job(Call *c, Str *id) {
    c->jobs = room_for(c, B_JOBS, (c->njobs + 1) * sizeof *c->jobs);
    Job *job = &c->jobs[c->njobs++];
    *job = (Job){.id = id, .name = queue_key(c, "job:", id)};
    job->row = RM_OpenKey(c->ctx, job->name, KEY_READ | KEY_WRITE);
    return job;
}

/* ---------------------------------------------------------------- replies */

/* How many bytes of a name an error line shows: the longest name of a row's key (a queue has up to 255 bytes) and an id
 * of the usual length. Who sweeps reads there whether a row or a set is in the way. */
enum { SHOWN = 320, SHOWN_ROOM = 4 * SHOWN + 32, MESSAGE_ROOM = 3 * SHOWN_ROOM };

/* Foreign bytes as they may stand in an error line: printable, one word, of bounded length. */
static const char *shown(const char *bytes, size_t len, char out[SHOWN_ROOM]) {
    size_t at = 0;
    for (size_t i = 0; i < len && i < SHOWN; i++) {
        unsigned char b = (unsigned char)bytes[i];
        if (b > ' ' && b < 0x7f && b != '\\')
            out[at++] = (char)b;
        else
            at += (size_t)snprintf(out + at, 5, "\\x%02x", b);
    }
    if (len > SHOWN) at += (size_t)snprintf(out + at, 32, "...(%zu-bytes)", len);
    out[at] = '\0';
    return out;
}

static const char *shown_str(const Str *s, char out[SHOWN_ROOM]) {
    size_t len = 0;
    const char *bytes = s ? RM_StringPtrLen(s, &len) : "";
    return shown(bytes, len, out);
}

/* Replies answer true and refusals false: a check can end with `|| refuse_job(…)`, a verb with either. */

static bool reply_number(Call *c, long long n) {
    return RM_ReplyWithLongLong(c->ctx, n) == OK;
}

static bool reply_text(Call *c, const char *text) {
    return RM_ReplyWithStringBuffer(c->ctx, text, strlen(text)) == OK;
}

static bool reply_array(Call *c, long elements) {
    return RM_ReplyWithArray(c->ctx, elements) == OK;
}

static long count(const Call *c, unsigned fates) {
    long n = 0;
    for (size_t i = 0; i < c->njobs; i++) n += ((unsigned)c->jobs[i].fate & fates) != 0;
    return n;
}

static bool reply_ids(Call *c, unsigned fates) {
    reply_array(c, count(c, fates));
    for (size_t i = 0; i < c->njobs; i++)
        if ((unsigned)c->jobs[i].fate & fates) RM_ReplyWithString(c->ctx, c->jobs[i].id);
    return true;
}

static bool refuse_argument(Call *c, const char *name, const char *why) {
    char message[MESSAGE_ROOM];
    snprintf(message, sizeof message, "ERR %s: %s %s", c->verb->name, name, why);
    RM_ReplyWithError(c->ctx, message);
    return false;
}

static bool refuse_key(Call *c, const Str *name, const char *expected) {
    char message[MESSAGE_ROOM], key[SHOWN_ROOM], base[SHOWN_ROOM];
    snprintf(message, sizeof message, "ERR %s: key %s is not %s%s", c->verb->name, shown_str(name, key),
             shown(c->base, c->base_len, base), expected);
    RM_ReplyWithError(c->ctx, message);
    return false;
}

static bool refuse_type(Call *c, const Str *name) {
    char message[MESSAGE_ROOM], key[SHOWN_ROOM];
    snprintf(message, sizeof message, "WRONGTYPE Operation against a key holding the wrong kind of value: %s",
             shown_str(name, key));
    RM_ReplyWithError(c->ctx, message);
    return false;
}

/* `EMQSTATE <id> …`, `EMQKIND <id> …`, `EMQSTALE <id> …`: the id is the second word. */
static bool refuse_job(Call *c, const char *code, const Str *id, const char *why) {
    char message[MESSAGE_ROOM], text[SHOWN_ROOM];
    snprintf(message, sizeof message, "%s %s %s", code, shown_str(id, text), why);
    RM_ReplyWithError(c->ctx, message);
    return false;
}

/* ---------------------------------------------------------------- rows and sets */

static bool same(const Str *a, const char *text, size_t len) {
    size_t n;
    const char *bytes = RM_StringPtrLen(a, &n);
    return n == len && memcmp(bytes, text, len) == 0;
}

static bool missing(Key *key) {
    return RM_KeyType(key) == TYPE_NONE;
}

static bool has_type(Key *key, int type) {
    int found = RM_KeyType(key);
    return found == type || found == TYPE_NONE;
}

/* The value of a field, to be freed by the caller; NULL where there is none. */
static Str *field(Call *c, Key *row, Word name) {
    Str *value = NULL;
    RM_HashGet(row, HASH_NONE, word(c, name), &value, NULL);
    return value;
}

static bool has_field(Call *c, Key *row, Word name) {
    int exists = 0;
    RM_HashGet(row, HASH_EXISTS, word(c, name), &exists, NULL);
    return exists != 0;
}

static void drop(Call *c, Str *s) {
    if (s) RM_FreeString(c->ctx, s);
}

/* A counter with room for more; a field that does not exist counts as 0. */
static bool counter(Call *c, Key *row, Word name, long long *value) {
    Str *text = field(c, row, name);
    *value = 0;
    bool good = !text || (RM_StringToLongLong(text, value) == OK && *value < INT64_MAX / 2);
    drop(c, text);
    return good;
}

static bool job_counter(Call *c, const Job *job, Word name, long long *value) {
    if (counter(c, job->row, name, value)) return true;
    char why[64];
    snprintf(why, sizeof why, "has a %s that does not count", word_text[name]);
    return refuse_job(c, "EMQSTATE", job->id, why);
}

/* The counter of a metrics hash. */
static bool metric(Call *c, long long *value) {
    if (counter(c, c->side, W_COUNT, value)) return true;
    char message[MESSAGE_ROOM], key[SHOWN_ROOM];
    snprintf(message, sizeof message, "ERR %s: field count of %s does not count", c->verb->name,
             shown_str(c->side_key, key));
    RM_ReplyWithError(c->ctx, message);
    return false;
}

/* Lane and flow rows are not native: other verbs than these know how to settle them. */
static bool lacks(Call *c, const Job *job, Word mark, const char *why) {
    return !has_field(c, job->row, mark) || refuse_job(c, "EMQSTATE", job->id, why);
}

static bool is_no_lane(Call *c, const Job *job) {
    return lacks(c, job, W_GROUP, "not native: a lane row (field group)");
}

static bool is_no_child(Call *c, const Job *job) {
    return lacks(c, job, W_PARENT, "not native: a flow child (field parent)");
}

static bool state_is(Call *c, const Job *job, Place place) {
    Str *state = field(c, job->row, W_STATE);
    bool is = state && same(state, word_text[place], strlen(word_text[place]));
    drop(c, state);
    return is;
}

static bool is_in(Call *c, const Job *job, Place place) {
    if (state_is(c, job, place)) return true;
    char why[SHOWN_ROOM + 64], text[SHOWN_ROOM];
    Str *state = field(c, job->row, W_STATE);
    if (state)
        snprintf(why, sizeof why, "is %s, not %s", shown_str(state, text), word_text[place]);
    else
        snprintf(why, sizeof why, "has no state, it should be %s", word_text[place]);
    drop(c, state);
    return refuse_job(c, "EMQSTATE", job->id, why);
}

/* The token is `attempts` as the holder's CLAIM wrote it, compared as bytes. */
static bool token_matches(Call *c, const Job *job, const Str *token) {
    Str *attempts = field(c, job->row, W_ATTEMPTS);
    size_t len;
    const char *bytes = RM_StringPtrLen(token, &len);
    bool matches = attempts && same(attempts, bytes, len);
    drop(c, attempts);
    return matches;
}

static bool is_held(Call *c, const Job *job) {
    return token_matches(c, job, c->token) || refuse_job(c, "EMQSTALE", job->id, "is not held with this token");
}

/* ---------------------------------------------------------------- effects */

/* The module signals its writes itself (OPTION_NO_IMPLICIT_SIGNAL_MODIFIED), when every key is closed again:
 * a sweep that finds nothing must not disturb those who WATCH or cache the sets. */
static void touch(Call *c, int type, const char *event, Str *name) {
    c->touched = room_for(c, B_TOUCHED, (c->ntouched + 1) * sizeof *c->touched);
    c->touched[c->ntouched++] = (Touch){type, event, name};
}

/* Members in one effect. Far below what any server reads in one command, far above a usual limit. */
enum { CHUNK = 16384 };

/* ZREM: takes the ids of these jobs out of a set. */
static void take(Call *c, Place from, const Job *jobs, size_t n) {
    if (n == 0) return;
    size_t room = n < CHUNK ? n : CHUNK;
    Str **ids = room_for(c, B_VECTOR, room * sizeof *ids);
    for (size_t done = 0; done < n;) {
        size_t k = 0;
        for (; k < room && done < n; k++, done++) {
            ids[k] = jobs[done].id;
            RM_ZsetRem(c->set[from], ids[k], NULL);
        }
        RM_Replicate(c->ctx, "ZREM", "sv", c->set_key[from], ids, k);
    }
    touch(c, NOTIFY_ZSET, "zrem", c->set_key[from]);
    if (missing(c->set[from])) touch(c, NOTIFY_GENERIC, "del", c->set_key[from]);
}

/* ZADD: puts the ids of those jobs that have one of these fates into a set, all with one score. */
static void put(Call *c, Place to, const Job *jobs, size_t n, unsigned fates, long long score) {
    size_t room = n < CHUNK ? n : CHUNK, k = 0;
    if (n == 0) return;
    Str **pairs = room_for(c, B_VECTOR, 2 * room * sizeof *pairs);
    Str *score_text = RM_CreateStringFromLongLong(c->ctx, score);
    bool any = false;
    for (size_t i = 0; i < n; i++) {
        if (!((unsigned)jobs[i].fate & fates)) continue;
        RM_ZsetAdd(c->set[to], (double)score, jobs[i].id, NULL);
        pairs[2 * k] = score_text;
        pairs[2 * k + 1] = jobs[i].id;
        if (++k < room) continue;
        RM_Replicate(c->ctx, "ZADD", "sv", c->set_key[to], pairs, 2 * k);
        any = true;
        k = 0;
    }
    if (k) RM_Replicate(c->ctx, "ZADD", "sv", c->set_key[to], pairs, 2 * k);
    drop(c, score_text);
    if (any || k) touch(c, NOTIFY_ZSET, "zadd", c->set_key[to]);
}

/* HSET: up to three fields of a hash; a NULL name ends them. */
static void set_fields(Call *c, Key *key, Str *name, Str *f1, Str *v1, Str *f2, Str *v2, Str *f3, Str *v3) {
    const char *format = f3 ? "sssssss" : f2 ? "sssss" : "sss";
    RM_HashSet(key, HASH_NONE, f1, v1, f2, v2, f3, v3, NULL);
    RM_Replicate(c->ctx, "HSET", format, name, f1, v1, f2, v2, f3, v3);
    touch(c, NOTIFY_HASH, "hset", name);
}

static void set_state(Call *c, const Job *job, Place place) {
    set_fields(c, job->row, job->name, word(c, W_STATE), word(c, (Word)place), NULL, NULL, NULL, NULL);
}

static void add_metric(Call *c, long long before, long long more) {
    Str *sum = RM_CreateStringFromLongLong(c->ctx, before + more);
    set_fields(c, c->side, c->side_key, word(c, W_COUNT), sum, NULL, NULL, NULL, NULL);
    drop(c, sum);
}

/* The stamp that tells an expiry which crossed a restart from a stall. */
static void stamp(Call *c, const Job *job) {
    Str *epoch = field(c, job->row, W_LEASE_EPOCH);
    if (!epoch || !same(epoch, run_id, strlen(run_id)))
        set_fields(c, job->row, job->name, word(c, W_LEASE_EPOCH), word(c, W_RUN_ID), NULL, NULL, NULL, NULL);
    drop(c, epoch);
}

/* ---------------------------------------------------------------- accepting a call */

/* numkeys as it was sent, or 0 where it does not fit the arguments that follow it. */
static int keys_announced(Str **argv, int argc) {
    long long n;
    if (argc < 2 || RM_StringToLongLong(argv[1], &n) != OK || n < 1 || n > argc - 2) return 0;
    return (int)n;
}

/* The server asks which arguments are keys (COMMAND GETKEYS, ACL, Cluster): numkeys alone says so, whatever the
 * verb will think of them. The flags are the verb's own where a key stands at a position that it knows. */
static void report_keys(const Verb *verb, Ctx *ctx, Str **argv, int argc) {
    int n = keys_announced(argv, argc);
    for (int i = 0; i < n; i++) {
        int flags = i < verb->nkeys ? verb->keys[i].flags : KEY_RW | KEY_ACCESS | KEY_UPDATE;
        if (RM_KeyAtPosWithFlags)
            RM_KeyAtPosWithFlags(ctx, 2 + i, flags);
        else
            RM_KeyAtPos(ctx, 2 + i);
    }
}

static bool takes_base_as_key(const Verb *v) {
    return v->nkeys > 0 && v->keys[v->nkeys - 1].role == K_BASE;
}

static bool accept_shape(Call *c) {
    const Verb *v = c->verb;
    int fixed = (v->nkeys ? 2 : 1) + v->nkeys + v->nargs;
    bool pairs = v->args[v->nargs] == A_PAIRS;
    if (c->argc < fixed || (pairs ? (c->argc - fixed) % 2 != 0 : c->argc != fixed)) {
        RM_WrongArity(c->ctx);
        return false;
    }
    if (v->nkeys == 0) return true;
    /* The base stands at the same place in both of its forms: as the last key, or as the argument after the keys. */
    int announced = keys_announced(c->argv, c->argc);
    if (announced == v->nkeys || (takes_base_as_key(v) && announced == v->nkeys - 1)) return true;
    char why[96];
    if (takes_base_as_key(v))
        snprintf(why, sizeof why, "must be %d (base as a key) or %d (base as an argument)", v->nkeys, v->nkeys - 1);
    else
        snprintf(why, sizeof why, "must be %d", v->nkeys);
    return refuse_argument(c, "numkeys", why);
}

/* emq:{q}: with a queue name that keeps the hash tag whole. */
static bool is_base(const char *s, size_t len) {
    if (len < sizeof "emq:{q}:" - 1) return false;
    if (memcmp(s, "emq:{", 5) != 0 || memcmp(s + len - 2, "}:", 2) != 0) return false;
    return !memchr(s + 5, '{', len - 7) && !memchr(s + 5, '}', len - 7);
}

/* The base: given, or what stands in front of the first set's name. */
static bool accept_base(Call *c) {
    const Verb *v = c->verb;
    const Str *source = NULL;
    const char *suffix = "";
    if (v->nkeys == 0) return true;
    for (int i = 0; i < v->nkeys && !source; i++)
        if (v->keys[i].role == K_BASE) source = c->argv[2 + i];
    for (int i = 0; i < v->nargs && !source; i++)
        if (v->args[i] == A_BASE) source = c->argv[2 + v->nkeys + i];
    for (int i = 0; i < v->nkeys && !source; i++)
        if (v->keys[i].role < K_ROW) {
            source = c->argv[2 + i];
            suffix = set_name[v->keys[i].role];
        }
    size_t len, suffix_len = strlen(suffix);
    c->base = RM_StringPtrLen(source, &len);
    c->base_len = len > suffix_len ? len - suffix_len : 0;
    if (is_base(c->base, c->base_len) && memcmp(c->base + c->base_len, suffix, suffix_len) == 0) return true;

    char why[SHOWN_ROOM + 64], text[SHOWN_ROOM];
    snprintf(why, sizeof why, "%s is not of the form emq:{queue}:%s", shown_str(source, text), suffix);
    return refuse_argument(c, suffix_len ? "key" : "base", why);
}

static bool accept_id(Call *c, const Str *id) {
    size_t len;
    const char *bytes = RM_StringPtrLen(id, &len);
    if (len >= 3 && memcmp(bytes, "JOB", 3) == 0) return true;
    return refuse_job(c, "EMQKIND", id, "is not a job id: it must begin with JOB");
}

static bool accept_number(Call *c, Arg arg, const Str *text, long long min, long long max, long long *out) {
    if (RM_StringToLongLong(text, out) == OK && *out >= min && *out <= max) return true;
    char why[96];
    snprintf(why, sizeof why, "must be an integer from %lld to %lld", min, max);
    return refuse_argument(c, arg_name[arg], why);
}

/* A span of milliseconds that starts now. */
static bool accept_span(Call *c, Arg arg, const Str *text) {
    long long ms;
    if (!accept_number(c, arg, text, 0, MAX_MS - c->now, &ms)) return false;
    c->due = c->now + ms;
    return true;
}

static bool accept_argument(Call *c, Arg arg, Str **at) {
    size_t len;
    const char *text = RM_StringPtrLen(*at, &len);
    switch (arg) {
    case A_ID: c->job.id = *at; return accept_id(c, *at);
    case A_TOKEN: c->token = *at; return true;
    case A_PAYLOAD: c->payload = *at; return true;
    case A_ERROR: c->error = *at; return true;
    case A_WHEN: /* `at` or `in`; its number is the next argument */
        if (len == 2 && strncasecmp(text, "at", 2) == 0) return accept_number(c, A_DUE_MS, at[1], 0, MAX_MS, &c->due);
        if (len == 2 && strncasecmp(text, "in", 2) == 0) return accept_span(c, A_DUE_MS, at[1]);
        return refuse_argument(c, arg_name[arg], "must be at or in");
    case A_LEASE_MS:
    case A_DELAY_MS: return accept_span(c, arg, *at);
    case A_MAX_ATTEMPTS:
    case A_MAX_STALLED: return accept_number(c, arg, *at, 0, INT64_MAX, &c->budget);
    case A_LIMIT: return accept_number(c, arg, *at, 1, INT64_MAX, &c->limit);
    default: return true; /* base and ms are read elsewhere */
    }
}

static bool accept_arguments(Call *c) {
    const Verb *v = c->verb;
    if (v->nkeys == 0) return true;
    for (int i = 0; i < v->nargs; i++)
        if (!accept_argument(c, v->args[i], c->argv + 2 + v->nkeys + i)) return false;
    c->first_pair = 2 + v->nkeys + v->nargs;
    for (int i = c->first_pair; i < c->argc; i += 2)
        if (!accept_id(c, c->argv[i])) return false;
    return true;
}

/* Each key is exactly what its position says. */
static bool accept_names(Call *c) {
    const Verb *v = c->verb;
    for (int i = 0; i < v->nkeys; i++) {
        KeyRole role = v->keys[i].role;
        Str *key = c->argv[2 + i];
        if (role == K_BASE) continue;
        char text[SHOWN_ROOM];
        const char *fixed = role == K_ROW ? "job:" : set_name[role];
        size_t len, tail_len = 0, fixed_len = strlen(fixed);
        const char *bytes = RM_StringPtrLen(key, &len);
        const char *tail = role == K_ROW ? RM_StringPtrLen(c->job.id, &tail_len) : "";
        if (len == c->base_len + fixed_len + tail_len && memcmp(bytes, c->base, c->base_len) == 0 &&
            memcmp(bytes + c->base_len, fixed, fixed_len) == 0 &&
            memcmp(bytes + c->base_len + fixed_len, tail, tail_len) == 0)
            continue;
        char expected[SHOWN_ROOM + 8];
        snprintf(expected, sizeof expected, "%s%s", fixed, shown(tail, tail_len, text));
        return refuse_key(c, key, expected);
    }
    return true;
}

static bool accept_types(Call *c) {
    const Verb *v = c->verb;
    for (int i = 0; i < v->nkeys; i++) {
        KeyRole role = v->keys[i].role;
        Str *name = c->argv[2 + i];
        if (role == K_BASE) continue;
        Key *key = RM_OpenKey(c->ctx, name, KEY_READ | KEY_WRITE);
        if (role == K_ROW) {
            c->job.name = name;
            c->job.row = key;
            c->job.fate = MOVE;
        } else {
            c->set_key[role] = name;
            c->set[role] = key;
        }
        if (!has_type(key, role == K_ROW ? TYPE_HASH : TYPE_ZSET)) return refuse_type(c, name);
    }
    if (v->side == NO_SIDE) return true;
    c->side_key = queue_key(c, side_name[v->side], NULL);
    c->side = RM_OpenKey(c->ctx, c->side_key, KEY_READ | KEY_WRITE);
    return has_type(c->side, TYPE_HASH) || refuse_type(c, c->side_key);
}

static void finish(Call *c) {
    for (int p = 0; p < PLACES; p++)
        if (c->set[p]) RM_CloseKey(c->set[p]);
    if (c->job.row) RM_CloseKey(c->job.row);
    if (c->side) RM_CloseKey(c->side);
    for (size_t i = 0; i < c->njobs; i++) RM_CloseKey(c->jobs[i].row);

    for (size_t i = 0; i < c->ntouched; i++) {
        RM_SignalModifiedKey(c->ctx, c->touched[i].name);
        RM_NotifyKeyspaceEvent(c->ctx, c->touched[i].type, c->touched[i].event, c->touched[i].name);
    }

    for (size_t i = 0; i < c->njobs; i++) {
        drop(c, c->jobs[i].id);
        drop(c, c->jobs[i].name);
    }
    drop(c, c->side_key);
    for (int w = 0; w < WORDS; w++) drop(c, c->word[w]);
    return_buffers(c);
}

static int run(const Verb *verb, Ctx *ctx, Str **argv, int argc) {
    if (RM_IsKeysPositionRequest(ctx)) {
        report_keys(verb, ctx, argv, argc);
        return OK;
    }
    Call c = {.verb = verb, .ctx = ctx, .argv = argv, .argc = argc, .now = RM_Milliseconds()};
    borrow_buffers(&c);
    if (accept_shape(&c) && accept_base(&c) && accept_arguments(&c) && accept_names(&c) && accept_types(&c))
        verb->body(&c);
    finish(&c);
    return OK;
}

/* ---------------------------------------------------------------- the verbs */

/* EMQ.ENQUEUE 2 row pending id payload
 * 1, or 0 where the row exists. */
static bool enqueue(Call *c) {
    if (!missing(c->job.row)) return reply_number(c, 0);
    set_fields(c, c->job.row, c->job.name, word(c, W_STATE), word(c, W_STATE_PENDING), word(c, W_PAYLOAD), c->payload,
               word(c, W_ATTEMPTS), word(c, W_ZERO));
    put(c, PENDING, &c->job, 1, MOVE, 0);
    return reply_number(c, 1);
}

/* EMQ.CLAIM 3 pending active base lease_ms
 * [id, payload, attempts]; [] where the queue is paused or empty, or its head has no row (that head is popped). */
static bool claim(Call *c) {
    Key *pending = c->set[PENDING];
    if (has_field(c, c->side, W_PAUSED) || missing(pending)) {
        return reply_array(c, 0);
    }
    RM_ZsetFirstInScoreRange(pending, -(double)INFINITY, (double)INFINITY, 0, 0);
    Job *job = add_job(c, RM_ZsetRangeCurrentElement(pending, NULL));
    RM_ZsetRangeStop(pending);
    if (missing(job->row)) {
        take(c, PENDING, job, 1);
        return reply_array(c, 0);
    }
    if (!has_type(job->row, TYPE_HASH)) return refuse_type(c, job->name);
    long long attempts;
    if (!is_in(c, job, PENDING) || !job_counter(c, job, W_ATTEMPTS, &attempts)) return false;

    job->fate = MOVE;
    Str *token = RM_CreateStringFromLongLong(c->ctx, attempts + 1);
    Str *payload = field(c, job->row, W_PAYLOAD);
    take(c, PENDING, job, 1);
    put(c, ACTIVE, job, 1, MOVE, c->due);
    set_fields(c, job->row, job->name, word(c, W_STATE), word(c, W_STATE_ACTIVE), word(c, W_ATTEMPTS), token,
               word(c, W_LEASE_EPOCH), word(c, W_RUN_ID));
    reply_array(c, 3);
    RM_ReplyWithString(c->ctx, job->id);
    if (payload)
        RM_ReplyWithString(c->ctx, payload);
    else
        RM_ReplyWithNull(c->ctx);
    drop(c, token);
    drop(c, payload);
    return reply_number(c, attempts + 1);
}

/* EMQ.EXTEND 2 active row id token lease_ms
 * 1, or -1 where the job is gone. */
static bool extend(Call *c) {
    if (missing(c->job.row)) return reply_number(c, -1);
    if (!is_in(c, &c->job, ACTIVE) || !is_held(c, &c->job)) return false;
    put(c, ACTIVE, &c->job, 1, MOVE, c->due);
    stamp(c, &c->job);
    return reply_number(c, 1);
}

/* EMQ.EXTENDS 3 active base lease_ms [id token …]
 * The ids that were not extended, in the order given: gone, not active, or held by somebody else. */
static bool extends(Call *c) {
    for (int i = c->first_pair; i < c->argc; i += 2) {
        RM_RetainString(c->ctx, c->argv[i]);
        Job *job = add_job(c, c->argv[i]);
        if (!has_type(job->row, TYPE_HASH)) return refuse_type(c, job->name);
        bool held = !missing(job->row) && state_is(c, job, ACTIVE) && token_matches(c, job, c->argv[i + 1]);
        job->fate = held ? MOVE : LEAVE;
    }
    put(c, ACTIVE, c->jobs, c->njobs, MOVE, c->due);
    for (size_t i = 0; i < c->njobs; i++)
        if (c->jobs[i].fate == MOVE) stamp(c, &c->jobs[i]);
    return reply_ids(c, LEAVE);
}

/* EMQ.COMPLETE 2 active row id token base
 * 1, or 0 where the job is gone. */
static bool complete(Call *c) {
    long long completed;
    if (missing(c->job.row)) return reply_number(c, 0);
    if (!is_no_lane(c, &c->job) || !is_no_child(c, &c->job)) return false;
    if (!is_in(c, &c->job, ACTIVE) || !is_held(c, &c->job)) return false;
    if (!metric(c, &completed)) return false;
    take(c, ACTIVE, &c->job, 1);
    RM_DeleteKey(c->job.row);
    RM_Replicate(c->ctx, "DEL", "s", c->job.name);
    touch(c, NOTIFY_GENERIC, "del", c->job.name);
    add_metric(c, completed, 1);
    return reply_number(c, 1);
}

/* EMQ.SCHEDULE 2 row schedule id payload at|in ms
 * 1, or 0 where the row exists. */
static bool schedule(Call *c) {
    if (!missing(c->job.row)) return reply_number(c, 0);
    set_fields(c, c->job.row, c->job.name, word(c, W_STATE), word(c, W_STATE_SCHEDULED), word(c, W_PAYLOAD), c->payload,
               word(c, W_ATTEMPTS), word(c, W_ZERO));
    put(c, SCHEDULE, &c->job, 1, MOVE, c->due);
    return reply_number(c, 1);
}

/* EMQ.RESCHEDULE 2 row schedule id at|in ms
 * 1, or -1 where the job is gone. */
static bool reschedule(Call *c) {
    if (missing(c->job.row)) return reply_number(c, -1);
    if (!is_in(c, &c->job, SCHEDULE)) return false;
    put(c, SCHEDULE, &c->job, 1, MOVE, c->due);
    return reply_number(c, 1);
}

/* EMQ.DELAY 3 active schedule row id token delay_ms
 * 1, or -1 where the job is gone. */
static bool delay(Call *c) {
    if (missing(c->job.row)) return reply_number(c, -1);
    if (!is_no_lane(c, &c->job) || !is_in(c, &c->job, ACTIVE) || !is_held(c, &c->job)) return false;
    take(c, ACTIVE, &c->job, 1);
    put(c, SCHEDULE, &c->job, 1, MOVE, c->due);
    set_state(c, &c->job, SCHEDULE);
    return reply_number(c, 1);
}

/* EMQ.FAIL 4 active schedule dead row id token delay_ms max_attempts error base
 * scheduled, or dead when this failure spends the budget. A job that is gone has no answer of its own: EMQSTATE. */
static bool fail(Call *c) {
    long long failures, failed = 0;
    if (missing(c->job.row)) return refuse_job(c, "EMQSTATE", c->job.id, "is gone: it has no row");
    if (!is_no_lane(c, &c->job) || !is_no_child(c, &c->job)) return false;
    if (!is_in(c, &c->job, ACTIVE) || !is_held(c, &c->job)) return false;
    if (!job_counter(c, &c->job, W_FAILURES, &failures)) return false;
    bool terminal = failures + 1 >= c->budget;
    if (terminal && !metric(c, &failed)) return false;

    Place to = terminal ? DEAD : SCHEDULE;
    Str *failures_text = RM_CreateStringFromLongLong(c->ctx, failures + 1);
    take(c, ACTIVE, &c->job, 1);
    put(c, to, &c->job, 1, MOVE, terminal ? 0 : c->due);
    set_fields(c, c->job.row, c->job.name, word(c, W_STATE), word(c, (Word)to), word(c, W_FAILURES), failures_text,
               word(c, W_LAST_ERROR), c->error);
    if (terminal) add_metric(c, failed, 1);
    drop(c, failures_text);
    return reply_text(c, word_text[to]);
}

/* EMQ.REPROCESS 3 row dead pending id
 * 1, or -1 where the job is gone. Keeps every counter. */
static bool reprocess(Call *c) {
    if (missing(c->job.row)) return reply_number(c, -1);
    if (!is_no_lane(c, &c->job) || !is_in(c, &c->job, DEAD)) return false;
    take(c, DEAD, &c->job, 1);
    put(c, PENDING, &c->job, 1, MOVE, 0);
    set_state(c, &c->job, PENDING);
    if (has_field(c, c->job.row, W_LAST_ERROR)) {
        RM_HashSet(c->job.row, HASH_NONE, word(c, W_LAST_ERROR), HASH_DELETE, NULL);
        RM_Replicate(c->ctx, "HDEL", "ss", c->job.name, word(c, W_LAST_ERROR));
        touch(c, NOTIFY_HASH, "hdel", c->job.name);
    }
    return reply_number(c, 1);
}

/* EMQ.REQUEUE 3 active pending row id token
 * 1, or -1 where the job is gone. Writes no counter. */
static bool requeue(Call *c) {
    if (missing(c->job.row)) return reply_number(c, -1);
    if (!is_no_lane(c, &c->job) || !is_in(c, &c->job, ACTIVE) || !is_held(c, &c->job)) return false;
    take(c, ACTIVE, &c->job, 1);
    put(c, PENDING, &c->job, 1, MOVE, 0);
    set_state(c, &c->job, PENDING);
    return reply_number(c, 1);
}

/* The first `limit` ids of a set whose time has come, each checked: a row of another place, a lane row or a row of
 * another type refuses the whole sweep. An id without a row is a GHOST, all others MOVE until the verb says more. */
static bool sweep(Call *c, Place from) {
    Key *set = c->set[from];
    if (missing(set)) return true;
    RM_ZsetFirstInScoreRange(set, -(double)INFINITY, (double)c->now, 0, 0);
    for (long long n = 0; n < c->limit && !RM_ZsetRangeEndReached(set); n++, RM_ZsetRangeNext(set)) {
        Job *job = add_job(c, RM_ZsetRangeCurrentElement(set, NULL));
        if (missing(job->row)) continue;
        if (!has_type(job->row, TYPE_HASH)) return refuse_type(c, job->name);
        if (!is_no_lane(c, job) || !is_in(c, job, from)) return false;
        job->fate = MOVE;
    }
    RM_ZsetRangeStop(set);
    return true;
}

/* EMQ.PROMOTE 3 schedule pending base limit
 * The number of jobs that moved. */
static bool promote(Call *c) {
    if (!sweep(c, SCHEDULE)) return false;
    take(c, SCHEDULE, c->jobs, c->njobs);
    put(c, PENDING, c->jobs, c->njobs, MOVE, 0);
    for (size_t i = 0; i < c->njobs; i++)
        if (c->jobs[i].fate == MOVE) set_state(c, &c->jobs[i], PENDING);
    return reply_number(c, count(c, MOVE));
}

/* A lease of an earlier server process expired because of the restart: that is nobody's stall. */
static bool crossed_restart(Call *c, const Job *job) {
    Str *epoch = field(c, job->row, W_LEASE_EPOCH);
    bool crossed = epoch && !same(epoch, run_id, strlen(run_id));
    drop(c, epoch);
    return crossed;
}

/* EMQ.STALLED.CHECK 4 active pending dead base max_stalled limit
 * [[recovered ids] [dead ids]] */
static bool stalled_check(Call *c) {
    long long failed = 0, stalls_value = 0;
    if (!sweep(c, ACTIVE)) return false;
    for (size_t i = 0; i < c->njobs; i++) {
        Job *job = &c->jobs[i];
        if (job->fate == GHOST) continue;
        job->fate = RECOVER;
        if (crossed_restart(c, job)) continue;
        if (!job_counter(c, job, W_STALLED, &job->stalled)) return false;
        job->fate = job->stalled + 1 < c->budget ? RECOVER_COUNTED : BURY;
    }
    long buried = count(c, BURY);
    if (buried && !metric(c, &failed)) return false;

    take(c, ACTIVE, c->jobs, c->njobs);
    put(c, PENDING, c->jobs, c->njobs, RECOVER | RECOVER_COUNTED, 0);
    put(c, DEAD, c->jobs, c->njobs, BURY, 0);
    Str *stalls = NULL; /* kept from job to job: their counts are mostly equal */
    for (size_t i = 0; i < c->njobs; i++) {
        const Job *job = &c->jobs[i];
        if (job->fate == RECOVER) set_state(c, job, PENDING);
        if (!(job->fate & (RECOVER_COUNTED | BURY))) continue;
        if (!stalls || job->stalled + 1 != stalls_value) {
            drop(c, stalls);
            stalls_value = job->stalled + 1;
            stalls = RM_CreateStringFromLongLong(c->ctx, stalls_value);
        }
        if (job->fate == BURY)
            set_fields(c, job->row, job->name, word(c, W_STATE), word(c, W_STATE_DEAD), word(c, W_STALLED), stalls,
                       word(c, W_LAST_ERROR), word(c, W_STALLED));
        else
            set_fields(c, job->row, job->name, word(c, W_STATE), word(c, W_STATE_PENDING), word(c, W_STALLED), stalls,
                       NULL, NULL);
    }
    drop(c, stalls);
    if (buried) add_metric(c, failed, buried);
    reply_array(c, 2);
    reply_ids(c, RECOVER | RECOVER_COUNTED);
    return reply_ids(c, BURY);
}

/* EMQ.VERSION
 * The tokens of the commands that are registered, in the table's order. */
static bool version(Call *c);

/* ---------------------------------------------------------------- the table */

#define READ (KEY_RO | KEY_ACCESS)
#define TAKEN (KEY_RW | KEY_DELETE)
#define READ_AND_TAKEN (KEY_RW | KEY_ACCESS | KEY_DELETE)
#define PUT_INTO (KEY_RW | KEY_INSERT)
#define CHANGED (KEY_RW | KEY_ACCESS | KEY_UPDATE)

#define KEYS(...) .keys = {__VA_ARGS__}, .nkeys = (int)(sizeof((KeyUse[]){__VA_ARGS__}) / sizeof(KeyUse))
#define ARGUMENTS(...) .args = {__VA_ARGS__}, .nargs = (int)(sizeof((Arg[]){__VA_ARGS__}) / sizeof(Arg))
#define PLUS_PAIRS(...) .args = {__VA_ARGS__, A_PAIRS}, .nargs = (int)(sizeof((Arg[]){__VA_ARGS__}) / sizeof(Arg))
#define BASE_KEY {K_BASE, CHANGED}

/* The order of the rows is the order of the tokens. Only a verb that adds a job is refused when memory is short:
 * the others move or end jobs, which is the way out. */
#define TABLE(ROW)                                                                                                     \
    ROW(enqueue, "EMQ.ENQUEUE", "enqueue", "write deny-oom fast", "Adds a job to pending", "O(log N)", NO_SIDE,        \
        KEYS({K_ROW, PUT_INTO}, {K_PENDING, PUT_INTO}), ARGUMENTS(A_ID, A_PAYLOAD))                                    \
    ROW(claim, "EMQ.CLAIM", "claim claim.pause", "write fast", "Leases the first pending job", "O(log N)", SIDE_META,  \
        KEYS({K_PENDING, READ_AND_TAKEN}, {K_ACTIVE, PUT_INTO}, BASE_KEY), ARGUMENTS(A_LEASE_MS))                      \
    ROW(extend, "EMQ.EXTEND", "extend", "write fast", "Extends the lease of a job", "O(log N)", NO_SIDE,               \
        KEYS({K_ACTIVE, CHANGED}, {K_ROW, CHANGED}), ARGUMENTS(A_ID, A_TOKEN, A_LEASE_MS))                             \
    ROW(extends, "EMQ.EXTENDS", "extends", "write", "Extends the leases of many jobs", "O(M log N), M jobs", NO_SIDE,  \
        KEYS({K_ACTIVE, CHANGED}, BASE_KEY), PLUS_PAIRS(A_LEASE_MS))                                                   \
    ROW(complete, "EMQ.COMPLETE", "complete.flat", "write fast", "Ends a job", "O(log N)", SIDE_COMPLETED,             \
        KEYS({K_ACTIVE, TAKEN}, {K_ROW, READ_AND_TAKEN}), ARGUMENTS(A_ID, A_TOKEN, A_BASE))                            \
    ROW(schedule, "EMQ.SCHEDULE", "schedule", "write deny-oom fast", "Adds a delayed job", "O(log N)", NO_SIDE,        \
        KEYS({K_ROW, PUT_INTO}, {K_SCHEDULE, PUT_INTO}), ARGUMENTS(A_ID, A_PAYLOAD, A_WHEN, A_DUE_MS))                 \
    ROW(promote, "EMQ.PROMOTE", "promote", "write", "Moves due jobs to pending", "O(M log N), M jobs", NO_SIDE,        \
        KEYS({K_SCHEDULE, READ_AND_TAKEN}, {K_PENDING, PUT_INTO}, BASE_KEY), ARGUMENTS(A_LIMIT))                       \
    ROW(reschedule, "EMQ.RESCHEDULE", "reschedule", "write fast", "Moves the due time of a job", "O(log N)", NO_SIDE,  \
        KEYS({K_ROW, READ}, {K_SCHEDULE, CHANGED}), ARGUMENTS(A_ID, A_WHEN, A_DUE_MS))                                 \
    ROW(delay, "EMQ.DELAY", "delay", "write fast", "Puts an active job back for later", "O(log N)", NO_SIDE,           \
        KEYS({K_ACTIVE, TAKEN}, {K_SCHEDULE, PUT_INTO}, {K_ROW, CHANGED}), ARGUMENTS(A_ID, A_TOKEN, A_DELAY_MS))       \
    ROW(fail, "EMQ.FAIL", "fail.flat", "write fast", "Counts a failure: retries later, or buries", "O(log N)",         \
        SIDE_FAILED, KEYS({K_ACTIVE, TAKEN}, {K_SCHEDULE, PUT_INTO}, {K_DEAD, PUT_INTO}, {K_ROW, CHANGED}),            \
        ARGUMENTS(A_ID, A_TOKEN, A_DELAY_MS, A_MAX_ATTEMPTS, A_ERROR, A_BASE))                                         \
    ROW(reprocess, "EMQ.REPROCESS", "reprocess", "write fast", "Gives a dead job another life", "O(log N)", NO_SIDE,   \
        KEYS({K_ROW, CHANGED}, {K_DEAD, TAKEN}, {K_PENDING, PUT_INTO}), ARGUMENTS(A_ID))                               \
    ROW(requeue, "EMQ.REQUEUE", "requeue", "write fast", "Gives an active job back", "O(log N)", NO_SIDE,              \
        KEYS({K_ACTIVE, TAKEN}, {K_PENDING, PUT_INTO}, {K_ROW, CHANGED}), ARGUMENTS(A_ID, A_TOKEN))                    \
    ROW(stalled_check, "EMQ.STALLED.CHECK", "stalled.check", "write", "Recovers or buries jobs whose lease expired",   \
        "O(M log N), M jobs", SIDE_FAILED,                                                                             \
        KEYS({K_ACTIVE, READ_AND_TAKEN}, {K_PENDING, PUT_INTO}, {K_DEAD, PUT_INTO}, BASE_KEY),                         \
        ARGUMENTS(A_MAX_STALLED, A_LIMIT))                                                                             \
    ROW(version, "EMQ.VERSION", NULL, "readonly fast", "The capability tokens of this node", "O(1)", NO_SIDE,          \
        .nkeys = 0, .nargs = 0)

#define INDEX(body, ...) INDEX_##body,
enum { TABLE(INDEX) VERBS };

static const Verb verbs[VERBS];

#define ENTRY(body, ...) \
    static int body##_entry(Ctx *ctx, Str **argv, int argc) { return run(&verbs[INDEX_##body], ctx, argv, argc); }
TABLE(ENTRY)

#define LINE(function, command, token, command_flags, text, cost, side_hash, ...)                                  \
    {.name = command, .tokens = token, .body = function, .entry = function##_entry, .flags = command_flags,         \
     .summary = text, .complexity = cost, .side = side_hash, __VA_ARGS__},
static const Verb verbs[VERBS] = {TABLE(LINE)};

static bool version(Call *c) {
    char tokens[512] = "";
    size_t at = 0;
    for (int i = 0; i < VERBS; i++)
        if (verbs[i].tokens)
            at += (size_t)snprintf(tokens + at, sizeof tokens - at, "%s%s", at ? " " : "", verbs[i].tokens);
    return reply_text(c, tokens);
}

/* ---------------------------------------------------------------- loading */

static bool fetch_api(Ctx *ctx) {
    int (*get)(const char *name, void *function);
    memcpy(&get, ctx, sizeof get); /* the getter is the first word of the context, by the module ABI */
#define FETCH(result, name, parameters) \
    if (get("RedisModule_" #name, (void *)&RM_##name) != OK) return false;
#define FETCH_IF_THERE(result, name, parameters) \
    if (get("RedisModule_" #name, (void *)&RM_##name) != OK) RM_##name = NULL;
    REQUIRED_API(FETCH)
    OPTIONAL_API(FETCH_IF_THERE)
    return true;
}

/* run_id is drawn when the server process starts and never changes: one reading lasts. */
static bool read_run_id(Ctx *ctx) {
    ServerInfo *info = RM_GetServerInfo(ctx, "server");
    Str *value = RM_ServerInfoGetField(ctx, info, "run_id");
    size_t len = 0;
    const char *text = value ? RM_StringPtrLen(value, &len) : NULL;
    bool good = len > 0 && len < sizeof run_id;
    if (good) {
        memcpy(run_id, text, len);
        run_id[len] = '\0';
    }
    if (value) RM_FreeString(ctx, value);
    RM_FreeServerInfo(ctx, info);
    return good;
}

static ArgDoc argument_doc(Arg arg) {
    static ArgDoc when[] = {
        {.name = "at", .type = ARG_PURE_TOKEN, .key_spec_index = -1, .token = "AT"},
        {.name = "in", .type = ARG_PURE_TOKEN, .key_spec_index = -1, .token = "IN"},
        {.name = NULL},
    };
    static ArgDoc pair[] = {
        {.name = "id", .type = ARG_STRING, .key_spec_index = -1},
        {.name = "token", .type = ARG_STRING, .key_spec_index = -1},
        {.name = NULL},
    };
    ArgDoc doc = {.name = arg_name[arg], .type = ARG_STRING, .key_spec_index = -1};
    switch (arg) {
    case A_WHEN:
        doc.type = ARG_ONEOF;
        doc.subargs = when;
        break;
    case A_PAIRS:
        doc.name = "lease";
        doc.type = ARG_BLOCK;
        doc.subargs = pair;
        doc.flags = ARG_OPTIONAL | ARG_MULTIPLE;
        break;
    case A_DUE_MS: case A_LEASE_MS: case A_DELAY_MS: case A_MAX_ATTEMPTS: case A_MAX_STALLED: case A_LIMIT:
        doc.type = ARG_INTEGER;
        break;
    default: break;
    }
    return doc;
}

/* COMMAND INFO and COMMAND DOCS, from the same description that accepts the calls. */
static bool describe(const Verb *v, Command *command) {
    static const CommandDocVersion doc_version = {1, sizeof(HistoryDoc), sizeof(KeySpec), sizeof(ArgDoc)};
    static const char *const key_name[] = {"pending", "active", "schedule", "dead", "row", "base"};
    KeySpec keys[2] = {{
        .notes = "what is done to a key depends on its position",
        .flags = CHANGED | KEY_VARIABLE_FLAGS,
        .begin_search_type = SEARCH_BY_INDEX,
        .bs.index.pos = 1,
        .find_keys_type = FIND_BY_KEYNUM,
        .fk.keynum = {.keynumidx = 0, .firstkey = 1, .keystep = 1},
    }};
    ArgDoc args[1 + MAX_KEYS + MAX_ARGS + 2] = {{.name = NULL}};
    int n = 0;
    if (v->nkeys) args[n++] = (ArgDoc){.name = "numkeys", .type = ARG_INTEGER, .key_spec_index = -1};
    for (int i = 0; i < v->nkeys; i++) args[n++] = (ArgDoc){.name = key_name[v->keys[i].role], .type = ARG_KEY};
    for (int i = 0; v->args[i] != A_END; i++) args[n++] = argument_doc(v->args[i]);

    int arity = (v->nkeys ? 2 : 1) + v->nkeys + v->nargs;
    CommandDoc doc = {
        .version = &doc_version,
        .summary = v->summary,
        .complexity = v->complexity,
        .since = "6.0.0",
        .arity = v->args[v->nargs] == A_PAIRS ? -arity : arity,
        .key_specs = v->nkeys ? keys : NULL,
        .args = n ? args : NULL,
    };
    return RM_SetCommandInfo(command, &doc) == OK;
}

static bool register_verb(Ctx *ctx, const Verb *v) {
    char flags[64];
    snprintf(flags, sizeof flags, "%s%s", v->flags, v->nkeys ? " getkeys-api" : "");
    if (RM_CreateCommand(ctx, v->name, v->entry, flags, 0, 0, 0) != OK) return false;
    Command *command = RM_GetCommand ? RM_GetCommand(ctx, v->name) : NULL;
    if (!command) return true;
    if (RM_SetCommandInfo && !describe(v, command)) return false;
    if (!RM_SetCommandACLCategories) return true;
    char categories[64];
    snprintf(categories, sizeof categories, "%s %s", v->nkeys ? "write sortedset hash" : "read",
             strstr(v->flags, "fast") ? "fast" : "slow");
    return RM_SetCommandACLCategories(command, categories) == OK;
}

/* Effects are sent by these names. Where the configuration renamed one, replicas and AOF would miss writes. */
static bool has_command(Ctx *ctx, const char *name) {
    errno = 0;
    CallReply *reply = RM_Call(ctx, name, ""); /* without arguments: refused for its arity, if it is there at all */
    if (reply) RM_FreeCallReply(reply);
    return errno == EINVAL;
}

static int refuse_to_load(Ctx *ctx, const char *why, const char *what) {
    RM_Log(ctx, "warning", "the job core was not loaded: %s%s", why, what);
    return ERR;
}

static int load(Ctx *ctx, int argc, int options) {
    static const char *const effects[] = {"ZADD", "ZREM", "HSET", "HDEL", "DEL"};
    if (!fetch_api(ctx) || RM_IsModuleNameBusy("emq")) return ERR;
    RM_SetModuleAttribs(ctx, "emq", 1, API_VERSION);
    if (argc != 0) return refuse_to_load(ctx, "it takes no arguments", "");
    if (!read_run_id(ctx)) return refuse_to_load(ctx, "INFO server has no run_id", "");
    for (size_t i = 0; i < sizeof effects / sizeof *effects; i++)
        if (!has_command(ctx, effects[i]))
            return refuse_to_load(ctx, "this server was configured without the command ", effects[i]);
    RM_SetModuleOptions(ctx, options);
    for (int i = 0; i < VERBS; i++)
        if (!register_verb(ctx, &verbs[i]))
            return refuse_to_load(ctx, "the server did not take the command ", verbs[i].name);
    return OK;
}

/* Valkey looks for its own names and, where it finds them, for no others; Redis knows only the second ones. The module
 * keeps no data of its own, so nothing of it stands in the way of a diskless load or of a slot that migrates. */
enum { OPTIONS = OPTION_NO_IMPLICIT_SIGNAL_MODIFIED | OPTION_HANDLE_REPL_ASYNC_LOAD };
enum { VALKEY_OPTIONS = OPTION_SKIP_COMMAND_VALIDATION | OPTION_HANDLE_ATOMIC_SLOT_MIGRATION };

#define EXPORTED __attribute__((visibility("default")))
EXPORTED int ValkeyModule_OnUnload(Ctx *ctx);
EXPORTED int RedisModule_OnUnload(Ctx *ctx);
EXPORTED int ValkeyModule_OnLoad(Ctx *ctx, Str **argv, int argc);
EXPORTED int RedisModule_OnLoad(Ctx *ctx, Str **argv, int argc);

int ValkeyModule_OnUnload(Ctx *ctx) {
    (void)ctx;
    for (int i = 0; i < BUFFERS; i++) RM_Free(spare[i].at);
    memset(spare, 0, sizeof spare);
    return OK;
}

int RedisModule_OnUnload(Ctx *ctx) {
    return ValkeyModule_OnUnload(ctx);
}

int ValkeyModule_OnLoad(Ctx *ctx, Str **argv, int argc) {
    (void)argv;
    return load(ctx, argc, OPTIONS | VALKEY_OPTIONS);
}

int RedisModule_OnLoad(Ctx *ctx, Str **argv, int argc) {
    (void)argv;
    return load(ctx, argc, OPTIONS);
}
