/* Lets user-mode-linux 6.1 run on processors whose register state is larger than it has room for.
 *
 * It keeps 2696 bytes of each process (up to AVX-512) and writes them back with PTRACE_SETREGSET. The host's kernel takes
 * nothing but the whole of what the processor has; with AMX that is 11 kB, and every process inside dies at once. Here
 * the rest is filled up with zeros: the header, which is within the part that is kept, says that it is not in use.
 * Loaded by LD_PRELOAD. Made without headers, so that a compiler alone will do.
 */
typedef unsigned long size_t;
struct iovec { void *base; size_t length; };
extern void *dlsym(void *, const char *);
extern void *memcpy(void *, const void *, size_t);
extern void *memset(void *, int, size_t);

enum { GETREGSET = 0x4204, SETREGSET = 0x4205, NT_X86_XSTATE = 0x202, MOST = 1 << 16 };

static long (*real)(int, int, void *, void *);
static unsigned char state[MOST];
static size_t whole;

static size_t whole_size(int pid)
{
	struct iovec all = { state, MOST };
	if (real(GETREGSET, pid, (void *) NT_X86_XSTATE, &all) != 0)
		return 0;
	memset(state, 0, MOST);
	return all.length;
}

long ptrace(int request, int pid, void *address, void *data)
{
	struct iovec *kept = data, all = { state, 0 };
	if (!real)
		real = dlsym((void *) -1L /* RTLD_NEXT */, "ptrace");
	if (request != SETREGSET || address != (void *) NT_X86_XSTATE)
		return real(request, pid, address, data);
	if (!whole)
		whole = whole_size(pid);
	if (kept->length >= whole)
		return real(request, pid, address, data);
	memcpy(state, kept->base, kept->length);
	all.length = whole;
	return real(request, pid, address, &all);
}
