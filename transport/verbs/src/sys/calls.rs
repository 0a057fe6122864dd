//! The functions of libibverbs and librdmacm: their types, and a table of their addresses.
//!
//! `dlsym` has no argument for the version of a symbol. It returns the default version, such as `ibv_create_cq@@IBVERBS_1.1`, with which a
//! program would be linked. The structures of this version are those that the binding declares. libibverbs also has versions for programs
//! from before 2007 (`@IBVERBS_1.0`), with other structures. These are hidden, and neither glibc nor musl returns a hidden version.
//! Functions from after 2010 are optional: if one is missing, its feature is missing.
//!
//! The libraries stay loaded until the process ends (`RTLD_NODELETE`), even if other parts of the process load and unload them. They cannot
//! be unloaded safely, because they have thread-local data, handlers for `fork` and open devices.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::cma::{rdma_cm_event, rdma_cm_id, rdma_conn_param, rdma_event_channel, rdma_port_space};
use super::ibv::{
    _compat_ibv_port_attr, ibv_ah, ibv_ah_attr, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device,
    ibv_device_attr, ibv_grh, ibv_mr, ibv_pd, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_srq, ibv_srq_init_attr,
    ibv_wc,
};
use super::ibv_enums::ibv_event_type;
use libc::sockaddr;

/// The reason why the libraries cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
// local: the text of one error
pub enum LibraryError {
    /// A library is missing, or the system cannot load it.
    #[error(
        "{name} cannot be loaded ({why}); install rdma-core (on Debian the packages librdmacm1 and ibverbs-providers)"
    )]
    Library {
        /// The file name of the library.
        name: &'static str,
        /// The error message of the dynamic loader.
        why: String,
    },
    /// A library lacks a function.
    #[error("{library} has no function {name}: it is too old; install rdma-core 20 or newer")]
    Function {
        /// The file name of the library.
        library: &'static str,
        /// The name of the function.
        name: &'static str,
    },
}

const VERBS: &str = "libibverbs.so.1";
const CM: &str = "librdmacm.so.1";

fn open(name: &'static str) -> Result<Library, LibraryError> {
    // SAFETY: loading runs the initializers of rdma-core's libraries. These only allocate memory for the libraries.
    let library = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL | libc::RTLD_NODELETE) };
    library.map_err(|error| LibraryError::Library { name, why: reason(&error) })
}

/// Returns the error message of the dynamic loader, without the name of the call that has failed.
fn reason(error: &libloading::Error) -> String {
    let text = error.to_string();
    text.strip_prefix("dlopen failed: ").map_or(text.clone(), str::to_owned)
}

macro_rules! functions {
    (
        required { $($library:ident fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)* }
        optional { $($olibrary:ident fn $oname:ident($($oarg:ident: $otype:ty),*) $(-> $oresult:ty)?;)* }
    ) => {
        /// The table of the functions' addresses.
        #[derive(Clone, Copy, Debug)]
        pub struct Calls {
            $(pub $name: unsafe extern "C" fn($($type),*) $(-> $result)?,)*
            $(pub $oname: Option<unsafe extern "C" fn($($otype),*) $(-> $oresult)?>,)*
        }

        impl Calls {
            /// Loads the libraries, and finds the address of every function.
            fn load() -> Result<Self, LibraryError> {
                let (verbs, cm) = (open(VERBS)?, open(CM)?);
                let calls = Self {
                    $($name: {
                        let (library, file) = libraries!($library, verbs, cm);
                        // SAFETY: by the library's header, the function with this name has this type.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($type),*) $(-> $result)?>(
                            concat!(stringify!($name), "\0").as_bytes(),
                        ) };
                        *symbol.map_err(|_| LibraryError::Function { library: file, name: stringify!($name) })?
                    },)*
                    $($oname: {
                        let (library, _) = libraries!($olibrary, verbs, cm);
                        // SAFETY: by the library's header, the function with this name has this type.
                        let symbol = unsafe { library.get::<unsafe extern "C" fn($($otype),*) $(-> $oresult)?>(
                            concat!(stringify!($oname), "\0").as_bytes(),
                        ) };
                        symbol.ok().map(|symbol| *symbol)
                    },)*
                };
                // Keep the libraries loaded until the process ends, because they cannot be unloaded safely.
                std::mem::forget((verbs, cm));
                Ok(calls)
            }
        }

        $(
            /// # Safety
            /// [`load`] has succeeded, and the caller meets the requirements in the function's manual page.
            #[inline]
            pub unsafe fn $name($($arg: $type),*) $(-> $result)? {
                // SAFETY: the caller meets the requirements of the function.
                unsafe { (calls().$name)($($arg),*) }
            }
        )*

        $(
            /// Returns the function. Returns `None` if the library is too old to have it.
            pub fn $oname() -> Option<unsafe extern "C" fn($($otype),*) $(-> $oresult)?> {
                calls().$oname
            }
        )*

        /// Returns every function that is declared here: its name, its type, and its type in the crate rdma-sys.
        #[cfg(all(test, feature = "rdma-sys"))]
        pub fn signatures() -> Vec<(&'static str, &'static str, &'static str)> {
            fn of<F>(_: F) -> &'static str {
                std::any::type_name::<F>()
            }
            macro_rules! infer { ($any:ty) => { _ }; }
            vec![
                $((
                    stringify!($name),
                    std::any::type_name::<unsafe extern "C" fn($($type),*) $(-> $result)?>(),
                    of(rdma_sys::$name as unsafe extern "C" fn($(infer!($type)),*) -> _),
                ),)*
                $((
                    stringify!($oname),
                    std::any::type_name::<unsafe extern "C" fn($($otype),*) $(-> $oresult)?>(),
                    of(rdma_sys::$oname as unsafe extern "C" fn($(infer!($otype)),*) -> _),
                ),)*
            ]
        }
    };
}

macro_rules! libraries {
    (verbs, $verbs:ident, $cm:ident) => {
        (&$verbs, VERBS)
    };
    (cm, $verbs:ident, $cm:ident) => {
        (&$cm, CM)
    };
}

functions! {
    required {
        verbs fn ibv_get_device_list(num_devices: *mut c_int) -> *mut *mut ibv_device;
        verbs fn ibv_free_device_list(list: *mut *mut ibv_device);
        verbs fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context;
        verbs fn ibv_close_device(context: *mut ibv_context) -> c_int;
        verbs fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
        verbs fn ibv_query_port(context: *mut ibv_context, port_num: u8, attr: *mut _compat_ibv_port_attr) -> c_int;
        verbs fn ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int;
        verbs fn ibv_ack_async_event(event: *mut ibv_async_event);
        verbs fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
        verbs fn ibv_dealloc_pd(pd: *mut ibv_pd) -> c_int;
        verbs fn ibv_reg_mr(pd: *mut ibv_pd, addr: *mut c_void, length: usize, access: c_int) -> *mut ibv_mr;
        verbs fn ibv_dereg_mr(mr: *mut ibv_mr) -> c_int;
        verbs fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
        verbs fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
        verbs fn ibv_create_cq(
            context: *mut ibv_context,
            cqe: c_int,
            cq_context: *mut c_void,
            channel: *mut ibv_comp_channel,
            comp_vector: c_int
        ) -> *mut ibv_cq;
        verbs fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
        verbs fn ibv_get_cq_event(
            channel: *mut ibv_comp_channel,
            cq: *mut *mut ibv_cq,
            cq_context: *mut *mut c_void
        ) -> c_int;
        verbs fn ibv_ack_cq_events(cq: *mut ibv_cq, nevents: c_uint);
        verbs fn ibv_create_srq(pd: *mut ibv_pd, attr: *mut ibv_srq_init_attr) -> *mut ibv_srq;
        verbs fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int;
        verbs fn ibv_create_qp(pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> *mut ibv_qp;
        verbs fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
        verbs fn ibv_query_qp(
            qp: *mut ibv_qp,
            attr: *mut ibv_qp_attr,
            mask: c_int,
            init: *mut ibv_qp_init_attr
        ) -> c_int;
        verbs fn ibv_fork_init() -> c_int;
        verbs fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int;
        verbs fn ibv_create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
        verbs fn ibv_destroy_ah(ah: *mut ibv_ah) -> c_int;
        verbs fn ibv_init_ah_from_wc(
            context: *mut ibv_context,
            port_num: u8,
            wc: *mut ibv_wc,
            grh: *mut ibv_grh,
            attr: *mut ibv_ah_attr
        ) -> c_int;

        cm fn rdma_create_event_channel() -> *mut rdma_event_channel;
        cm fn rdma_destroy_event_channel(channel: *mut rdma_event_channel);
        cm fn rdma_get_cm_event(channel: *mut rdma_event_channel, event: *mut *mut rdma_cm_event) -> c_int;
        cm fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int;
        cm fn rdma_create_id(
            channel: *mut rdma_event_channel,
            id: *mut *mut rdma_cm_id,
            context: *mut c_void,
            ps: rdma_port_space::Type
        ) -> c_int;
        cm fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int;
        cm fn rdma_migrate_id(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> c_int;
        cm fn rdma_set_option(
            id: *mut rdma_cm_id,
            level: c_int,
            name: c_int,
            value: *mut c_void,
            length: usize
        ) -> c_int;
        cm fn rdma_bind_addr(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int;
        cm fn rdma_resolve_addr(
            id: *mut rdma_cm_id,
            src: *mut sockaddr,
            dst: *mut sockaddr,
            timeout_ms: c_int
        ) -> c_int;
        cm fn rdma_resolve_route(id: *mut rdma_cm_id, timeout_ms: c_int) -> c_int;
        cm fn rdma_create_qp(id: *mut rdma_cm_id, pd: *mut ibv_pd, attr: *mut ibv_qp_init_attr) -> c_int;
        cm fn rdma_connect(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int;
        cm fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int;
        cm fn rdma_accept(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int;
        cm fn rdma_reject(id: *mut rdma_cm_id, data: *const c_void, length: u8) -> c_int;
        cm fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type::Type) -> c_int;
        cm fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int;
        cm fn rdma_join_multicast(id: *mut rdma_cm_id, addr: *mut sockaddr, context: *mut c_void) -> c_int;
        cm fn rdma_leave_multicast(id: *mut rdma_cm_id, addr: *mut sockaddr) -> c_int;
        cm fn rdma_get_devices(num_devices: *mut c_int) -> *mut *mut ibv_context;
        cm fn rdma_free_devices(list: *mut *mut ibv_context);
    }
    optional {
        verbs fn ibv_reg_mr_iova2(
            pd: *mut ibv_pd,
            addr: *mut c_void,
            length: usize,
            iova: u64,
            access: c_uint
        ) -> *mut ibv_mr;
        verbs fn ibv_reg_dmabuf_mr(
            pd: *mut ibv_pd,
            offset: u64,
            length: usize,
            iova: u64,
            fd: c_int,
            access: c_int
        ) -> *mut ibv_mr;
    }
}

static LOADED: OnceLock<Result<Calls, LibraryError>> = OnceLock::new();

/// Loads the libraries, once per process. If this fails, all later calls fail as well, even if the libraries are
/// installed in the meantime.
pub fn load() -> Result<(), LibraryError> {
    LOADED.get_or_init(Calls::load).as_ref().map(|_| ()).map_err(Clone::clone)
}

/// Replaces the functions of the libraries by those of a test, for the whole process.
#[cfg(test)]
pub fn install(calls: Calls) {
    LOADED.get_or_init(|| Ok(calls)).as_ref().expect("no test loads the libraries");
}

#[inline]
fn calls() -> &'static Calls {
    match LOADED.get() {
        Some(Ok(calls)) => calls,
        _ => unreachable!("no object of the libraries exists before they are loaded"),
    }
}
