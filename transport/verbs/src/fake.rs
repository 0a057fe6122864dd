//! A fake of libibverbs and librdmacm for tests, with one device. It imitates the drivers of adapters that are not available for tests. A
//! [`Personality`] selects how the device differs from a plain one. Each test names the source code of the driver that the fake imitates in
//! this test.
//!
//! The fake does not implement any logic of the code under test. It only keeps objects, answers calls, and logs the calls. It never frees
//! its objects, so a late use of an object is detected and does no damage.

use std::collections::{BTreeMap, VecDeque};
use std::ffi::{c_int, c_uint, c_void};
use std::net::SocketAddr;
use std::path::Path;
use std::ptr;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use super::channel::EventChannel;
use super::ffi::address;
use super::parts::Verbs;
use super::sys::*;

/// The ways in which the device differs from a plain device.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Personality {
    pub(crate) iwarp: bool,
    /// The device is the kernel's software RoCE.
    pub(crate) rxe: bool,
    /// The local region into which an RDMA Read places data must grant remote writes.
    pub(crate) sink_needs_remote_write: bool,
    /// The device refuses the error state while the connection closes.
    pub(crate) refuses_error_while_closing: bool,
    /// A queue pair in the error state still holds a receive that it has consumed from a shared queue. The receive completes when the test
    /// reports the event `IBV_EVENT_QP_LAST_WQE_REACHED`. If the queue pair is destroyed before this event, the receive is lost.
    pub(crate) holds_a_receive: bool,
    /// The device supports thread domains.
    pub(crate) thread_domains: bool,
    /// The device is the last one of the system: the library's list of devices is empty. When an id on the device is destroyed, the library
    /// closes the device, and another thread opens a file with the same descriptor number.
    pub(crate) last_device: bool,
    /// A new queue pair has the address of the one that was destroyed last.
    pub(crate) reuses_memory: bool,
}

/// The state of a queue pair in the fake.
#[derive(Debug, Default)]
pub(crate) struct QpState {
    pub(crate) in_error: bool,
    pub(crate) destroyed: bool,
    closing: bool,
    /// The `wr_id` of a shared receive that is consumed but not completed.
    held: Option<u64>,
}

#[derive(Default)]
struct FakeState {
    next: u32,
    /// The events of each channel, by the channel's address.
    events: BTreeMap<usize, VecDeque<rdma_cm_event>>,
    async_events: VecDeque<ibv_async_event>,
    qps: BTreeMap<usize, QpState>,
    completions: BTreeMap<usize, VecDeque<ibv_wc>>,
    shared: BTreeMap<usize, VecDeque<u64>>,
    broken_queues: Vec<usize>,
    channel_broken: bool,
    regions: BTreeMap<u32, c_uint>,
    /// The states of ports, as codes. A port without an entry is active.
    ports: BTreeMap<u8, c_uint>,
    /// The MTUs of ports, as codes. A port without an entry has an MTU of 4,096 bytes.
    mtus: BTreeMap<u8, c_uint>,
    /// If true, registrations of memory wait, to imitate registrations of gigabytes. `registering`
    /// is the number of registrations in progress.
    holds_registrations: bool,
    registering: usize,
    /// The calls that fail, by name, with the error of each.
    failing: BTreeMap<&'static str, c_int>,
    /// The address of the queue pair that was destroyed last.
    freed: Option<usize>,
    /// The read ends of the completion channels, which are pipes in the fake.
    channels: Vec<c_int>,
    log: Vec<String>,
}

impl FakeState {
    /// Logs the transition of a queue pair to INIT, RTR or RTS. Like a device, checks that all attributes that the
    /// state needs are set.
    fn transition(&mut self, attr: &ibv_qp_attr, mask: c_int) -> c_int {
        use ibv_qp_state::{IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS};
        let (wanted, call, line) = match attr.qp_state {
            IBV_QPS_INIT => {
                (1 | 8 | 16 | 32, "to_init", format!("INIT port {} rights {}", attr.port_num, attr.qp_access_flags))
            }
            IBV_QPS_RTR => {
                let route = attr.ah_attr.grh;
                let line = format!(
                    "RTR to {} from {} gid {} class {} mtu {} serves {} rnr timer {}",
                    attr.dest_qp_num,
                    attr.rq_psn,
                    route.sgid_index,
                    route.traffic_class,
                    attr.path_mtu,
                    attr.max_dest_rd_atomic,
                    attr.min_rnr_timer
                );
                (1 | 128 | 256 | 4096 | 32768 | 131_072 | 1 << 20, "to_rtr", line)
            }
            IBV_QPS_RTS => {
                let line = format!(
                    "RTS from {} timeout {} retries {} rnr {} asks {}",
                    attr.sq_psn, attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic
                );
                (1 | 512 | 1024 | 2048 | 8192 | 65536, "to_rts", line)
            }
            _ => return 0,
        };
        if let Some(&error) = self.failing.get(call) {
            return error;
        }
        self.log.push(line);
        if mask == wanted { 0 } else { libc::EINVAL }
    }
}

/// A fake device, and its state.
pub(crate) struct Fake {
    personality: Personality,
    context: *mut verbs_context,
    state: Mutex<FakeState>,
    released: Condvar,
}

// SAFETY: the pointers are to objects that are never freed. A lock protects the shared state.
unsafe impl Sync for Fake {}
// SAFETY: the pointers are to objects that are never freed, and that any thread may use.
unsafe impl Send for Fake {}

thread_local! {
    /// The fake device of the event channels that this thread creates.
    static CURRENT: std::cell::Cell<Option<&'static Fake>> = const { std::cell::Cell::new(None) };
}

#[repr(C)]
struct FakeChannel {
    raw: rdma_event_channel,
    fake: &'static Fake,
}

/// An extended context, followed by a reference to its fake device.
#[repr(C)]
struct FakeContext {
    verbs: verbs_context,
    fake: Option<&'static Fake>,
}

fn leak<T>(value: T) -> *mut T {
    Box::into_raw(Box::new(value))
}

fn zeroed<T>() -> T {
    // SAFETY: the function is used only for structures of the libraries. Their fields are numbers and pointers, for
    // which zeros are valid.
    unsafe { std::mem::zeroed() }
}

fn counter() -> c_int {
    // SAFETY: the call makes a descriptor, and accesses no memory.
    unsafe { libc::eventfd(0, libc::EFD_NONBLOCK | libc::EFD_CLOEXEC) }
}

/// Makes a descriptor in place of a device's file.
fn file() -> c_int {
    // SAFETY: the name is a NUL-terminated string.
    unsafe { libc::memfd_create(c"infiniband".as_ptr(), libc::MFD_CLOEXEC) }
}

fn ring(fd: c_int) {
    let one = 1_u64;
    // SAFETY: the call reads the eight bytes of a number, and writes to a descriptor of the fake.
    unsafe { libc::write(fd, (&raw const one).cast(), 8) };
}

fn errno(code: c_int) -> c_int {
    // SAFETY: the pointer is to this thread's `errno`.
    unsafe { *libc::__errno_location() = code }
    -1
}

/// # Safety
/// `context` is a context of the fake.
unsafe fn fake_of(context: *mut ibv_context) -> &'static Fake {
    // SAFETY: a context of the fake is a field of its `FakeContext`.
    unsafe {
        let verbs = context.cast::<u8>().sub(std::mem::offset_of!(verbs_context, context));
        (*verbs.cast::<FakeContext>()).fake.expect("a fake's context")
    }
}

impl Fake {
    /// Makes a device. Providers that this thread opens afterwards are on this device.
    pub(crate) fn new(personality: Personality) -> &'static Self {
        install(table());
        let mut device: ibv_device = zeroed();
        device.transport_type = if personality.iwarp { 1 } else { 0 };
        device.node_type = if personality.iwarp { 4 } else { 1 };
        for (target, byte) in device.name.iter_mut().zip(b"fake0") {
            *target = *byte as _;
        }
        let mut verbs: verbs_context = zeroed();
        verbs.sz = size_of::<verbs_context>();
        verbs.query_port = Some(query_port_fake);
        if personality.thread_domains {
            verbs.alloc_td = Some(alloc_td_fake);
            verbs.dealloc_td = Some(dealloc_td_fake);
            verbs.alloc_parent_domain = Some(alloc_parent_domain_fake);
        }
        verbs.context.device = leak(device);
        verbs.context.abi_compat = ptr::without_provenance_mut(usize::MAX);
        verbs.context.async_fd = counter();
        verbs.context.cmd_fd = counter();
        if personality.last_device {
            verbs.context.cmd_fd = file();
        }
        verbs.context.num_comp_vectors = 2;
        let ops = &mut verbs.context.ops;
        ops.poll_cq = Some(poll_cq);
        ops.req_notify_cq = Some(req_notify_cq);
        ops.post_send = Some(post_send);
        ops.post_recv = Some(post_recv);
        ops.post_srq_recv = Some(post_srq_recv);
        let context = leak(FakeContext { verbs, fake: None });
        let state = Mutex::new(FakeState { next: 1, ..FakeState::default() });
        let fake: &'static Self =
            Box::leak(Box::new(Self { personality, context: context.cast(), state, released: Condvar::new() }));
        // SAFETY: this function has made the context, and nothing else uses it yet.
        unsafe { (*context).fake = Some(fake) };
        CURRENT.set(Some(fake));
        fake
    }

    /// Opens a provider on the device that this thread made last.
    pub(crate) fn provider() -> Verbs {
        Verbs::on_channel(Ok(Arc::new(EventChannel::open().unwrap()))).unwrap()
    }

    /// Opens a provider without a connection manager, on the device that this thread made last. `sysfs` is the folder
    /// that lists the devices.
    pub(crate) fn provider_without_manager(sysfs: &Path) -> Verbs {
        let mut verbs = Verbs::on_channel(Err("/dev/infiniband/rdma_cm is missing".into())).unwrap();
        verbs.exchanges.sysfs = sysfs.into();
        // Each random number differs from the previous one, so that tests can distinguish them.
        let mut next = 0_u8;
        verbs.with_entropy(Box::new(move |octets| {
            next += 1;
            octets.fill(next);
        }))
    }

    fn state(&self) -> MutexGuard<'_, FakeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn context(&self) -> *mut ibv_context {
        // SAFETY: the context is never freed.
        unsafe { &raw mut (*self.context).context }
    }

    fn note(&self, what: impl Into<String>) {
        self.state().log.push(what.into());
    }

    /// Returns the log since the last call of this function.
    pub(crate) fn noted(&self) -> Vec<String> {
        std::mem::take(&mut self.state().log)
    }

    fn event(&self, id: *mut rdma_cm_id, event: u32) {
        // SAFETY: ids are never freed.
        let channel = unsafe { (*id).channel };
        let mut made: rdma_cm_event = zeroed();
        (made.id, made.event) = (id, event);
        self.state().events.entry(channel.addr()).or_default().push_back(made);
        // SAFETY: channels are never freed.
        ring(unsafe { (*channel).fd });
    }

    /// Adds a connection-manager event for the id of a queue pair.
    pub(crate) fn cm_event(&self, qp: &Handle, event: u32) {
        if event == rdma_cm_event_type::RDMA_CM_EVENT_DISCONNECTED {
            self.state().qps.get_mut(&qp.qp.addr()).expect("a queue pair").closing = false;
        }
        self.event(qp.id, event);
    }

    /// Adds a connection-manager event for an id.
    pub(crate) fn id_event(&self, id: *mut rdma_cm_id, event: u32) {
        self.event(id, event);
    }

    /// Adds an asynchronous event of the device.
    pub(crate) fn async_event(&self, kind: u32, element: ibv_async_event_element_t) {
        self.state().async_events.push_back(ibv_async_event { element, event_type: kind });
        // SAFETY: the context is never freed.
        ring(unsafe { (*self.context()).async_fd });
    }

    pub(crate) fn port_event(&self, kind: u32, port: u8) {
        let is_down = kind == ibv_event_type::IBV_EVENT_PORT_ERR;
        self.set_port(port, if is_down { ibv_port_state::IBV_PORT_DOWN } else { ibv_port_state::IBV_PORT_ACTIVE });
        self.async_event(kind, ibv_async_event_element_t { port_num: port.into() });
    }

    /// Sets the state of a port without an event. The state is a code.
    pub(crate) fn set_port(&self, port: u8, state: c_uint) {
        self.state().ports.insert(port, state);
    }

    /// Sets the MTU of a port, as a code: 1 means 256 bytes, 2 means 512 bytes, and so on.
    pub(crate) fn set_mtu(&self, port: u8, code: c_uint) {
        self.state().mtus.insert(port, code);
    }

    /// Reports that a queue pair has failed.
    pub(crate) fn queue_pair_failed(&self, qp: &Handle) {
        self.async_event(ibv_event_type::IBV_EVENT_QP_FATAL, ibv_async_event_element_t { qp: qp.qp });
    }

    /// Reports that the receive completion queue of a queue pair has overrun.
    pub(crate) fn overrun(&self, qp: &Handle) {
        // SAFETY: queue pairs are never freed.
        let cq = unsafe { (*qp.qp).recv_cq };
        self.async_event(ibv_event_type::IBV_EVENT_CQ_ERR, ibv_async_event_element_t { cq });
    }

    /// Adds a completion to the receive completion queue of a queue pair.
    pub(crate) fn complete(&self, qp: &Handle, wc: ibv_wc) {
        // SAFETY: queue pairs are never freed.
        let (cq, number) = unsafe { ((*qp.qp).recv_cq, (*qp.qp).qp_num) };
        self.state().completions.entry(cq.addr()).or_default().push_back(ibv_wc { qp_num: number, ..wc });
    }

    /// Completes the receive that a queue pair holds, and reports the event `IBV_EVENT_QP_LAST_WQE_REACHED` of the
    /// queue pair.
    pub(crate) fn last_receive(&self, qp: &Handle) {
        let held = self.state().qps.get_mut(&qp.qp.addr()).and_then(|qp| qp.held.take());
        if let Some(wr_id) = held {
            self.complete(qp, ibv_wc { wr_id, status: 5, ..zeroed() });
        }
        self.async_event(ibv_event_type::IBV_EVENT_QP_LAST_WQE_REACHED, ibv_async_event_element_t { qp: qp.qp });
    }

    /// Consumes a receive from the shared queue of a queue pair, as an arriving message does. Returns the receive's
    /// `wr_id`.
    pub(crate) fn take_shared(&self, qp: &Handle) -> u64 {
        // SAFETY: queue pairs are never freed.
        let srq = unsafe { (*qp.qp).srq };
        self.state().shared.get_mut(&srq.addr()).and_then(VecDeque::pop_front).expect("a shared receive")
    }

    pub(crate) fn qp<T>(&self, qp: &Handle, look: impl FnOnce(&QpState) -> T) -> T {
        look(&self.state().qps[&qp.qp.addr()])
    }

    /// Returns the address of the domain in which a queue pair was created.
    pub(crate) fn domain(qp: &Handle) -> usize {
        // SAFETY: queue pairs are never freed.
        unsafe { (*qp.qp).pd.addr() }
    }

    /// Makes one poll of the queue pair's receive completion queue fail: the next poll that finds
    /// no completion in the queue. As on mlx5, later polls succeed.
    pub(crate) fn break_queue(&self, qp: &Handle) {
        // SAFETY: queue pairs are never freed.
        let cq = unsafe { (*qp.qp).recv_cq };
        self.state().broken_queues.push(cq.addr());
    }

    /// Makes registrations of memory wait, or lets them continue.
    pub(crate) fn hold_registrations(&self, hold: bool) {
        self.state().holds_registrations = hold;
        self.released.notify_all();
    }

    /// Returns true if a registration is waiting.
    pub(crate) fn is_registering(&self) -> bool {
        self.state().registering > 0
    }

    /// Makes all later calls with this name fail with `error`. With 0, they succeed again.
    pub(crate) fn fail(&self, call: &'static str, error: c_int) {
        self.state().failing.insert(call, error);
    }

    /// Returns the result of a call: the error with which it fails, or 0.
    fn returns(&self, call: &'static str) -> c_int {
        self.state().failing.get(call).copied().unwrap_or(0)
    }

    /// Returns the keys of the registrations that were not released.
    pub(crate) fn registered(&self) -> Vec<u32> {
        self.state().regions.keys().copied().collect()
    }

    /// Acts as the kernel does when a device was removed: it destroys all objects that processes have on the device. Commands then fail,
    /// and completion channels report an error (the kernel's drivers/infiniband/core/uverbs_main.c, `ib_uverbs_free_hw_resources`).
    pub(crate) fn tear_down(&self) {
        for call in ["dereg_mr", "destroy_qp", "destroy_srq", "modify_qp"] {
            self.fail(call, libc::EIO);
        }
        for fd in std::mem::take(&mut self.state().channels) {
            // SAFETY: the fake has opened the descriptor. Its other end then reports an error.
            unsafe { libc::close(fd) };
        }
    }

    /// Acts as a library that closes the device while another thread opens a file, which gets the same descriptor
    /// number.
    fn close_device(&self) {
        // SAFETY: the fake has opened the descriptors.
        unsafe {
            let again = file();
            libc::dup3(again, self.descriptor(), libc::O_CLOEXEC);
            libc::close(again);
        }
    }

    /// Returns the descriptor of the open device.
    pub(crate) fn descriptor(&self) -> c_int {
        // SAFETY: the context is never freed.
        unsafe { (*self.context()).cmd_fd }
    }

    /// Makes every later read of completion events fail.
    pub(crate) fn break_channel(&self) {
        self.state().channel_broken = true;
    }
}

/// A queue pair of the fake, and its id.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Handle {
    pub(crate) qp: *mut ibv_qp,
    pub(crate) id: *mut rdma_cm_id,
}

// Functions of the connection manager.

unsafe extern "C" fn create_event_channel() -> *mut rdma_event_channel {
    let fake = CURRENT.get().expect("a fake on this thread");
    leak(FakeChannel { raw: rdma_event_channel { fd: counter() }, fake }).cast()
}

unsafe extern "C" fn destroy_event_channel(channel: *mut rdma_event_channel) {
    // SAFETY: the descriptor was made together with the channel.
    unsafe { libc::close((*channel).fd) };
}

/// # Safety
/// `id` is an id of the fake.
unsafe fn of_id(id: *mut rdma_cm_id) -> &'static Fake {
    // SAFETY: the channel of an id is a `FakeChannel` of the fake.
    unsafe { (*(*id).channel.cast::<FakeChannel>()).fake }
}

unsafe extern "C" fn get_cm_event(channel: *mut rdma_event_channel, out: *mut *mut rdma_cm_event) -> c_int {
    // SAFETY: the channel is a channel of the fake.
    let fake = unsafe { (*channel.cast::<FakeChannel>()).fake };
    match fake.state().events.get_mut(&channel.addr()).and_then(VecDeque::pop_front) {
        Some(event) => {
            // SAFETY: the caller passes memory for the result.
            unsafe { *out = leak(event) };
            0
        }
        None => errno(libc::EAGAIN),
    }
}

unsafe extern "C" fn ack_cm_event(_: *mut rdma_cm_event) -> c_int {
    0
}

unsafe extern "C" fn create_id(
    channel: *mut rdma_event_channel,
    out: *mut *mut rdma_cm_id,
    context: *mut c_void,
    ps: c_uint,
) -> c_int {
    let mut id: rdma_cm_id = zeroed();
    (id.channel, id.context, id.ps) = (channel, context, ps);
    // SAFETY: the caller passes memory for the result.
    unsafe { *out = leak(id) };
    0
}

unsafe extern "C" fn destroy_id(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the id is an id of the fake.
    let fake = unsafe { of_id(id) };
    // SAFETY: the id is an id of the fake.
    if fake.personality.last_device && unsafe { !(*id).verbs.is_null() } {
        fake.close_device();
    }
    0
}

unsafe extern "C" fn migrate_id(_: *mut rdma_cm_id, _: *mut rdma_event_channel) -> c_int {
    errno(libc::EOPNOTSUPP)
}

unsafe extern "C" fn set_option(id: *mut rdma_cm_id, _: c_int, option: c_int, value: *mut c_void, len: usize) -> c_int {
    // SAFETY: the caller passes a value of `len` bytes.
    let bytes = unsafe { std::slice::from_raw_parts(value.cast::<u8>(), len) };
    // SAFETY: the id is an id of the fake.
    unsafe { of_id(id) }.note(format!("option {option} = {bytes:?}"));
    0
}

/// Puts an id on the device. The last byte of the IP address is the number of the port; 0 means no port.
///
/// # Safety
/// `id` is an id of the fake, and `addr` is an IP address.
unsafe fn write_address(id: *mut rdma_cm_id, addr: *mut libc::sockaddr) {
    // SAFETY: the caller promises that the id and the address are valid. Each address is read in the format of its family.
    unsafe {
        let last = if i32::from((*addr).sa_family) == libc::AF_INET6 {
            let sin6 = *addr.cast::<libc::sockaddr_in6>();
            (*id).route.addr.src_addr_union.src_sin6 = sin6;
            sin6.sin6_addr.s6_addr[15]
        } else {
            let sin = *addr.cast::<libc::sockaddr_in>();
            (*id).route.addr.src_addr_union.src_sin = sin;
            u32::from_be(sin.sin_addr.s_addr) as u8
        };
        if last > 0 {
            (*id).verbs = of_id(id).context();
            (*id).port_num = last;
        }
    }
}

/// Binds an id. Like the kernel, refuses a link-local address without a scope (`cma_check_linklocal` in drivers/infiniband/core/cma.c).
unsafe extern "C" fn bind_addr(id: *mut rdma_cm_id, addr: *mut libc::sockaddr) -> c_int {
    // SAFETY: the caller passes an IP address, which has the length of its family.
    if let Some(SocketAddr::V6(v6)) = unsafe { address(addr) } {
        if v6.ip().is_unicast_link_local() && v6.scope_id() == 0 {
            return errno(libc::EINVAL);
        }
    }
    // SAFETY: the caller passes an IP address.
    unsafe { write_address(id, addr) };
    0
}

/// Resolves an address. An address that ends in 99 is reached by no device. An address that ends in 98 never resolves.
unsafe extern "C" fn resolve_addr(
    id: *mut rdma_cm_id,
    _: *mut libc::sockaddr,
    to: *mut libc::sockaddr,
    _: c_int,
) -> c_int {
    // SAFETY: the id is an id of the fake, and the caller passes an IP address. Each address is read in the format of its family.
    unsafe {
        if (*id).verbs.is_null() {
            write_address(id, to);
        }
        let last = if i32::from((*to).sa_family) == libc::AF_INET6 {
            let peer = *to.cast::<libc::sockaddr_in6>();
            (*id).route.addr.dst_addr_union.dst_sin6 = peer;
            peer.sin6_addr.s6_addr[15]
        } else {
            let peer = *to.cast::<libc::sockaddr_in>();
            (*id).route.addr.dst_addr_union.dst_sin = peer;
            peer.sin_addr.s_addr.to_ne_bytes()[3]
        };
        match last {
            99 => return errno(libc::ENODEV),
            98 => {}
            _ => of_id(id).event(id, rdma_cm_event_type::RDMA_CM_EVENT_ADDR_RESOLVED),
        }
    }
    0
}

unsafe extern "C" fn resolve_route(id: *mut rdma_cm_id, _: c_int) -> c_int {
    // SAFETY: the id is an id of the fake.
    unsafe { of_id(id) }.event(id, rdma_cm_event_type::RDMA_CM_EVENT_ROUTE_RESOLVED);
    0
}

unsafe extern "C" fn create_cm_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> c_int {
    // SAFETY: the caller passes live objects.
    unsafe {
        (*id).qp = create_qp(pd, attr);
        if (*id).qp.is_null() { -1 } else { 0 }
    }
}

unsafe extern "C" fn connect(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int {
    // SAFETY: the caller passes live objects.
    let (fake, param) = unsafe { (of_id(id), *param) };
    if fake.returns("connect") != 0 {
        return errno(fake.returns("connect"));
    }
    fake.note(format!("connect retry {} rnr {}", param.retry_count, param.rnr_retry_count));
    fake.event(id, rdma_cm_event_type::RDMA_CM_EVENT_ESTABLISHED);
    0
}

unsafe extern "C" fn listen(_: *mut rdma_cm_id, _: c_int) -> c_int {
    0
}

unsafe extern "C" fn accept(id: *mut rdma_cm_id, _: *mut rdma_conn_param) -> c_int {
    // SAFETY: the id is an id of the fake.
    unsafe { of_id(id) }.event(id, rdma_cm_event_type::RDMA_CM_EVENT_ESTABLISHED);
    0
}

unsafe extern "C" fn reject(_: *mut rdma_cm_id, _: *const c_void, _: u8) -> c_int {
    0
}

unsafe extern "C" fn notify(_: *mut rdma_cm_id, _: c_uint) -> c_int {
    0
}

unsafe extern "C" fn disconnect(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: the id is an id of the fake.
    let (fake, qp) = unsafe { (of_id(id), (*id).qp) };
    fake.note("disconnect");
    if let Some(qp) = fake.state().qps.get_mut(&qp.addr()) {
        qp.closing = true;
    }
    0
}

unsafe extern "C" fn multicast(_: *mut rdma_cm_id, _: *mut libc::sockaddr, _: *mut c_void) -> c_int {
    errno(libc::EOPNOTSUPP)
}

unsafe extern "C" fn leave(_: *mut rdma_cm_id, _: *mut libc::sockaddr) -> c_int {
    0
}

unsafe extern "C" fn no_devices(_: *mut c_int) -> *mut *mut ibv_context {
    let last = CURRENT.get().is_some_and(|fake| fake.personality.last_device);
    if last { ptr::null_mut() } else { leak(ptr::null_mut()) }
}

unsafe extern "C" fn free_devices(_: *mut *mut ibv_context) {}

// Functions of devices.

unsafe extern "C" fn fork_init() -> c_int {
    let fake = CURRENT.get().expect("a fake on this thread");
    fake.note("fork init");
    fake.returns("fork_init")
}

unsafe extern "C" fn device_list(count: *mut c_int) -> *mut *mut ibv_device {
    let fake = CURRENT.get().expect("a fake on this thread");
    // SAFETY: the context and its device are never freed. The caller passes memory for the count.
    unsafe {
        *count = 1;
        leak([(*fake.context()).device, ptr::null_mut()]).cast()
    }
}

unsafe extern "C" fn open_device(_: *mut ibv_device) -> *mut ibv_context {
    let fake = CURRENT.get().expect("a fake on this thread");
    if fake.returns("open_device") != 0 {
        errno(fake.returns("open_device"));
        return ptr::null_mut();
    }
    fake.note("device opened");
    fake.context()
}

unsafe extern "C" fn close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: the context is a context of the fake.
    unsafe { fake_of(context) }.note("device closed");
    0
}

unsafe extern "C" fn free_device_list(_: *mut *mut ibv_device) {}

unsafe extern "C" fn query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    // SAFETY: the context is a context of the fake.
    let is_rxe = unsafe { fake_of(context) }.personality.rxe;
    let mut made: ibv_device_attr = zeroed();
    made.vendor_id = if is_rxe { 0x00ff_ffff } else { 0x02c9 };
    (made.max_qp_wr, made.max_sge, made.max_cqe) = (1024, 30, 65536);
    (made.max_srq, made.max_srq_wr, made.max_srq_sge) = (16, 1024, 4);
    (made.max_qp_rd_atom, made.max_qp_init_rd_atom, made.max_sge_rd) = (16, 16, 4);
    // SAFETY: the caller passes memory for the result.
    unsafe { *attr = made };
    0
}

unsafe extern "C" fn query_port_classic(_: *mut ibv_context, _: u8, _: *mut _compat_ibv_port_attr) -> c_int {
    libc::EOPNOTSUPP
}

unsafe extern "C" fn query_port_fake(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr, _: usize) -> c_int {
    // SAFETY: the context is a context of the fake.
    let fake = unsafe { fake_of(context) };
    fake.note(format!("query port {port}"));
    let mut made: ibv_port_attr = zeroed();
    made.state = fake.state().ports.get(&port).copied().unwrap_or(ibv_port_state::IBV_PORT_ACTIVE);
    // A subnet manager gives a port its LID before it arms the port.
    made.lid = if made.state < ibv_port_state::IBV_PORT_ARMED { 0 } else { 7 };
    made.link_layer = 2;
    made.active_mtu = fake.state().mtus.get(&port).copied().unwrap_or(5);
    made.max_msg_sz = 1 << 30;
    // SAFETY: the caller passes memory for the result.
    unsafe { *attr = made };
    0
}

unsafe extern "C" fn get_async_event(context: *mut ibv_context, out: *mut ibv_async_event) -> c_int {
    // SAFETY: the context is a context of the fake.
    let mut state = unsafe { fake_of(context) }.state();
    match state.async_events.pop_front() {
        Some(event) => {
            if state.async_events.is_empty() {
                let mut count = 0_u64;
                // SAFETY: the buffer has eight bytes. The call resets the eventfd, so that it is not readable any more.
                unsafe { libc::read((*context).async_fd, (&raw mut count).cast(), 8) };
            }
            // SAFETY: the caller passes memory for the result.
            unsafe { *out = event };
            0
        }
        None => errno(libc::EAGAIN),
    }
}

unsafe extern "C" fn ack_async_event(_: *mut ibv_async_event) {}

unsafe extern "C" fn alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    leak(ibv_pd { context, handle: 0 })
}

unsafe extern "C" fn dealloc_pd(pd: *mut ibv_pd) -> c_int {
    // SAFETY: the domain is a domain of the fake.
    let (fake, handle) = unsafe { (fake_of((*pd).context), (*pd).handle) };
    fake.note(if handle == 0 { "domain freed" } else { "parent domain freed" });
    0
}

unsafe extern "C" fn alloc_td_fake(context: *mut ibv_context, _: *mut ibv_td_init_attr) -> *mut ibv_td {
    leak(ibv_td { context })
}

unsafe extern "C" fn dealloc_td_fake(td: *mut ibv_td) -> c_int {
    // SAFETY: the thread domain is a thread domain of the fake.
    unsafe { fake_of((*td).context) }.note("thread domain freed");
    0
}

unsafe extern "C" fn alloc_parent_domain_fake(
    context: *mut ibv_context,
    _: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    leak(ibv_pd { context, handle: 1 })
}

unsafe extern "C" fn reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr {
    // SAFETY: the domain is a domain of the fake.
    let context = unsafe { (*pd).context };
    // SAFETY: the context is a context of the fake.
    let fake = unsafe { fake_of(context) };
    let mut state = fake.state();
    state.registering += 1;
    while state.holds_registrations {
        state = fake.released.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    state.registering -= 1;
    state.next += 1;
    let key = state.next;
    state.regions.insert(key, access as c_uint);
    leak(ibv_mr { context, pd, addr, length, handle: key, lkey: key, rkey: key })
}

unsafe extern "C" fn dereg_mr(mr: *mut ibv_mr) -> c_int {
    // SAFETY: the registration is a registration of the fake.
    let (fake, key) = unsafe { (fake_of((*mr).context), (*mr).lkey) };
    let rc = fake.returns("dereg_mr");
    if rc == 0 {
        assert!(fake.state().regions.remove(&key).is_some(), "released once");
    }
    rc
}

unsafe extern "C" fn create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel {
    let mut ends = [0; 2];
    // SAFETY: the pointer is to memory for two descriptors.
    assert_eq!(unsafe { libc::pipe2(ends.as_mut_ptr(), libc::O_CLOEXEC) }, 0);
    // SAFETY: the context is a context of the fake.
    unsafe { fake_of(context) }.state().channels.push(ends[0]);
    leak(ibv_comp_channel { context, fd: ends[1], refcnt: 0 })
}

unsafe extern "C" fn destroy_comp_channel(_: *mut ibv_comp_channel) -> c_int {
    0
}

unsafe extern "C" fn create_cq(
    context: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    let mut cq: ibv_cq = zeroed();
    (cq.context, cq.channel, cq.cq_context, cq.cqe) = (context, channel, cq_context, cqe);
    if !channel.is_null() {
        // SAFETY: the context is a context of the fake.
        unsafe { fake_of(context) }.note(format!("queue on vector {vector}"));
    }
    leak(cq)
}

unsafe extern "C" fn destroy_cq(_: *mut ibv_cq) -> c_int {
    0
}

unsafe extern "C" fn get_cq_event(channel: *mut ibv_comp_channel, _: *mut *mut ibv_cq, _: *mut *mut c_void) -> c_int {
    // SAFETY: the channel is a channel of the fake.
    let broken = unsafe { fake_of((*channel).context) }.state().channel_broken;
    errno(if broken { libc::EIO } else { libc::EAGAIN })
}

unsafe extern "C" fn ack_cq_events(_: *mut ibv_cq, _: c_uint) {}

unsafe extern "C" fn create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    let mut srq: ibv_srq = zeroed();
    // SAFETY: the caller passes live objects.
    unsafe { (srq.context, srq.srq_context, srq.pd) = ((*pd).context, (*attr).srq_context, pd) };
    leak(srq)
}

unsafe extern "C" fn destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: the caller passes live objects.
    let fake = unsafe { fake_of((*srq).context) };
    let rc = fake.returns("destroy_srq");
    if rc == 0 {
        fake.note("shared queue freed");
    }
    rc
}

unsafe extern "C" fn create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    let mut qp: ibv_qp = zeroed();
    // SAFETY: the caller passes live objects.
    let (fake, attr) = unsafe { (fake_of((*pd).context), &*attr) };
    if fake.returns("create_qp") != 0 {
        errno(fake.returns("create_qp"));
        return ptr::null_mut();
    }
    (qp.context, qp.pd, qp.qp_context) = (fake.context(), pd, attr.qp_context);
    (qp.send_cq, qp.recv_cq, qp.srq) = (attr.send_cq, attr.recv_cq, attr.srq);
    let mut state = fake.state();
    state.next += 1;
    qp.qp_num = state.next;
    let qp = match state.freed.take().filter(|_| fake.personality.reuses_memory) {
        Some(freed) => {
            let memory: *mut ibv_qp = ptr::with_exposed_provenance_mut(freed);
            // SAFETY: the memory is that of a destroyed queue pair. It was never freed, and nothing uses it any more.
            unsafe { memory.write(qp) };
            memory
        }
        None => leak(qp),
    };
    let _ = qp.expose_provenance();
    state.qps.insert(qp.addr(), QpState::default());
    qp
}

unsafe extern "C" fn modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: the caller passes live objects.
    let (fake, attr, srq) = unsafe { (fake_of((*qp).context), &*attr, (*qp).srq) };
    let rc = fake.returns("modify_qp");
    if rc != 0 {
        return rc;
    }
    let mut state = fake.state();
    if mask & 32768 != 0 {
        state.log.push(format!("min rnr timer {}", attr.min_rnr_timer));
    }
    if mask & 1 != 0 {
        let rc = state.transition(attr, mask);
        if rc != 0 {
            return rc;
        }
    }
    if mask & 1 == 0 || attr.qp_state != ibv_qp_state::IBV_QPS_ERR {
        return 0;
    }
    let held = state.shared.get_mut(&srq.addr()).filter(|_| fake.personality.holds_a_receive);
    let held = held.and_then(VecDeque::pop_front);
    let Some(entry) = state.qps.get_mut(&qp.addr()) else { return libc::EINVAL };
    if entry.closing && fake.personality.refuses_error_while_closing {
        state.log.push("error state refused".into());
        return libc::EINVAL;
    }
    let reset = entry.closing && fake.personality.iwarp;
    if !std::mem::replace(&mut entry.in_error, true) {
        entry.held = held;
    }
    state.log.push(if reset { "error state, connection reset" } else { "error state" }.into());
    0
}

unsafe extern "C" fn query_qp(_: *mut ibv_qp, _: *mut ibv_qp_attr, _: c_int, _: *mut ibv_qp_init_attr) -> c_int {
    libc::EOPNOTSUPP
}

unsafe extern "C" fn destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: the caller passes live objects.
    let fake = unsafe { fake_of((*qp).context) };
    let rc = fake.returns("destroy_qp");
    if rc != 0 {
        return rc;
    }
    let mut state = fake.state();
    if let Some(entry) = state.qps.get_mut(&qp.addr()) {
        assert!(!entry.destroyed, "destroyed once");
        entry.destroyed = true;
        let lost = entry.held.take().is_some();
        state.freed = Some(qp.expose_provenance());
        if lost {
            state.log.push("a receive was lost with the queue pair".into());
        }
    }
    0
}

unsafe extern "C" fn create_ah(_: *mut ibv_pd, _: *mut ibv_ah_attr) -> *mut ibv_ah {
    leak(zeroed())
}

unsafe extern "C" fn destroy_ah(_: *mut ibv_ah) -> c_int {
    0
}

unsafe extern "C" fn init_ah(
    _: *mut ibv_context,
    _: u8,
    _: *mut ibv_wc,
    _: *mut ibv_grh,
    _: *mut ibv_ah_attr,
) -> c_int {
    errno(libc::EOPNOTSUPP)
}

// Functions of the data path.

unsafe extern "C" fn poll_cq(cq: *mut ibv_cq, entries: c_int, wc: *mut ibv_wc) -> c_int {
    // SAFETY: the caller passes live objects.
    let fake = unsafe { fake_of((*cq).context) };
    let mut state = fake.state();
    if state.completions.get(&cq.addr()).is_none_or(VecDeque::is_empty) {
        if let Some(at) = state.broken_queues.iter().position(|&broken| broken == cq.addr()) {
            state.broken_queues.remove(at);
            return -1;
        }
    }
    let Some(queue) = state.completions.get_mut(&cq.addr()) else { return 0 };
    let mut count = 0;
    while count < entries {
        let Some(next) = queue.pop_front() else { break };
        // SAFETY: the caller passes memory for this number of completions. As on mlx5, a failed completion does not
        // overwrite the opcode in the buffer.
        unsafe {
            let entry = wc.add(count as usize);
            let stale = (*entry).opcode;
            *entry = next;
            if next.status != 0 {
                (*entry).opcode = stale;
            }
        }
        count += 1;
    }
    count
}

unsafe extern "C" fn req_notify_cq(_: *mut ibv_cq, _: c_int) -> c_int {
    0
}

unsafe extern "C" fn post_send(qp: *mut ibv_qp, wr: *mut ibv_send_wr, _: *mut *mut ibv_send_wr) -> c_int {
    // SAFETY: the caller passes live objects.
    let (fake, wr) = unsafe { (fake_of((*qp).context), &*wr) };
    let mut state = fake.state();
    if wr.opcode == ibv_wr_opcode::IBV_WR_RDMA_READ && fake.personality.sink_needs_remote_write {
        // SAFETY: a Read has at least one entry.
        let key = unsafe { (*wr.sg_list).lkey };
        let open = state.regions.get(&key).is_some_and(|rights| rights & 2 != 0);
        let mut wc: ibv_wc = zeroed();
        // SAFETY: the caller passes live objects.
        let (cq, number) = unsafe { ((*qp).send_cq, (*qp).qp_num) };
        (wc.wr_id, wc.qp_num, wc.opcode) = (wr.wr_id, number, ibv_wc_opcode::IBV_WC_RDMA_READ);
        (wc.status, wc.vendor_err) = if open { (0, 0) } else { (4, 0x104) };
        state.completions.entry(cq.addr()).or_default().push_back(wc);
    }
    0
}

unsafe extern "C" fn post_recv(_: *mut ibv_qp, _: *mut ibv_recv_wr, _: *mut *mut ibv_recv_wr) -> c_int {
    0
}

unsafe extern "C" fn post_srq_recv(srq: *mut ibv_srq, wr: *mut ibv_recv_wr, _: *mut *mut ibv_recv_wr) -> c_int {
    // SAFETY: the caller passes live objects.
    let fake = unsafe { fake_of((*srq).context) };
    let mut state = fake.state();
    let queue = state.shared.entry(srq.addr()).or_default();
    let mut at = wr;
    while !at.is_null() {
        // SAFETY: the caller passes a chain of live work requests.
        unsafe {
            queue.push_back((*at).wr_id);
            at = (*at).next;
        }
    }
    0
}

fn table() -> Calls {
    Calls {
        ibv_get_device_list: device_list,
        ibv_open_device: open_device,
        ibv_close_device: close_device,
        ibv_free_device_list: free_device_list,
        ibv_query_device: query_device,
        ibv_query_port: query_port_classic,
        ibv_get_async_event: get_async_event,
        ibv_ack_async_event: ack_async_event,
        ibv_alloc_pd: alloc_pd,
        ibv_dealloc_pd: dealloc_pd,
        ibv_reg_mr: reg_mr,
        ibv_dereg_mr: dereg_mr,
        ibv_create_comp_channel: create_comp_channel,
        ibv_destroy_comp_channel: destroy_comp_channel,
        ibv_create_cq: create_cq,
        ibv_destroy_cq: destroy_cq,
        ibv_get_cq_event: get_cq_event,
        ibv_ack_cq_events: ack_cq_events,
        ibv_create_srq: create_srq,
        ibv_destroy_srq: destroy_srq,
        ibv_create_qp: create_qp,
        ibv_modify_qp: modify_qp,
        ibv_query_qp: query_qp,
        ibv_fork_init: fork_init,
        ibv_destroy_qp: destroy_qp,
        ibv_create_ah: create_ah,
        ibv_destroy_ah: destroy_ah,
        ibv_init_ah_from_wc: init_ah,
        rdma_create_event_channel: create_event_channel,
        rdma_destroy_event_channel: destroy_event_channel,
        rdma_get_cm_event: get_cm_event,
        rdma_ack_cm_event: ack_cm_event,
        rdma_create_id: create_id,
        rdma_destroy_id: destroy_id,
        rdma_migrate_id: migrate_id,
        rdma_set_option: set_option,
        rdma_bind_addr: bind_addr,
        rdma_resolve_addr: resolve_addr,
        rdma_resolve_route: resolve_route,
        rdma_create_qp: create_cm_qp,
        rdma_connect: connect,
        rdma_listen: listen,
        rdma_accept: accept,
        rdma_reject: reject,
        rdma_notify: notify,
        rdma_disconnect: disconnect,
        rdma_join_multicast: multicast,
        rdma_leave_multicast: leave,
        rdma_get_devices: no_devices,
        rdma_free_devices: free_devices,
        ibv_reg_mr_iova2: None,
        ibv_reg_dmabuf_mr: None,
    }
}
