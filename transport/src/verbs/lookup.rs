//! Names and services, looked up with `rdma_getaddrinfo`(3).

use std::ffi::CString;
use std::io;
use std::ptr;

use super::core::Verbs;
use super::ffi::place;
use super::sys::{self, RAI_PASSIVE, rdma_addrinfo, rdma_freeaddrinfo, rdma_getaddrinfo, rdma_port_space};
use crate::error::{Error, Result};
use crate::place::Place;

/// The purpose of a look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lookup {
    /// To connect there.
    Connect,
    /// To listen there.
    Listen,
}

/// Addresses that one look-up gives at most.
const FOUND: usize = 64;

impl Verbs {
    /// Looks a node up, a name or an address, with a service, a name or a port number. Where the InfiniBand address resolver
    /// (`ibacm`) runs, addresses of InfiniBand are among those found.
    ///
    /// It **blocks** while the system asks its name servers: call it before the loop runs, or on another thread.
    ///
    /// # Errors
    /// [`Error::NoLibrary`] as from [`Verbs::open`]; [`Error::Address`] for a text with a zero byte in it; [`Error::Io`] when
    /// nothing is found.
    pub fn lookup(node: &str, service: &str, usage: Lookup) -> Result<Vec<Place>> {
        sys::load().map_err(|missing| Error::NoLibrary { reason: missing.to_string() })?;
        let text = |text: &str| CString::new(text).map_err(|_| Error::Address { text: text.into() });
        let (node, service) = (text(node)?, text(service)?);
        // SAFETY: all fields are numbers and pointers for which null is good.
        let mut hints: rdma_addrinfo = unsafe { std::mem::zeroed() };
        hints.ai_flags = if usage == Lookup::Listen { RAI_PASSIVE } else { 0 };
        hints.ai_port_space = rdma_port_space::RDMA_PS_TCP as i32;
        let mut list = ptr::null_mut();
        // SAFETY: strings that end in zero, hints, and a place for the result; the libraries are loaded.
        let rc = unsafe { rdma_getaddrinfo(node.as_ptr(), service.as_ptr(), &raw const hints, &raw mut list) };
        match rc {
            0 => {}
            -1 => return Err(Error::io("rdma_getaddrinfo", io::Error::last_os_error())),
            // The codes of `getaddrinfo`(3).
            code => {
                let error = io::Error::new(io::ErrorKind::NotFound, format!("nothing is found (code {code})"));
                return Err(Error::io("rdma_getaddrinfo", error));
            }
        }
        let mut found = Vec::new();
        let mut at = list;
        while !at.is_null() && found.len() < FOUND {
            // SAFETY: an element of the list, which is whole until it is freed below.
            let entry = unsafe { *at };
            let wanted = if usage == Lookup::Listen { entry.ai_src_addr } else { entry.ai_dst_addr };
            if !wanted.is_null() {
                // SAFETY: the list holds whole addresses.
                found.extend(unsafe { place(wanted) });
            }
            at = entry.ai_next;
        }
        // SAFETY: given back once; what was in it is copied.
        unsafe { rdma_freeaddrinfo(list) }
        Ok(found)
    }
}
