//! Resolves the host names of peers. `getaddrinfo`(3) blocks, so it runs on other threads.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::thread;

use crossbeam_channel::{Receiver, Sender, unbounded};
use rdma_transport::cm::{ExchangeOptions, PathOptions};

use crate::id::ConnectionId;
use crate::seam::wake::WakeFlag;

/// The largest number of names that are resolved at the same time. Any further names are queued,
/// and the connect timeout of a connection includes the time that its name spends in the queue.
const THREADS: usize = 4;

/// A name to resolve, for a connection.
#[derive(Debug)]
pub(super) struct HostQuery {
    pub(super) of: ConnectionId,
    pub(super) host: String, // local: a name of the program
    pub(super) port: u16,
    pub(super) path: PathOptions,
    pub(super) exchange: Option<ExchangeOptions>,
}

/// The result for a name: its addresses, or an error.
#[derive(Debug)]
pub(super) struct HostAddresses {
    pub(super) query: HostQuery,
    pub(super) addresses: io::Result<Vec<SocketAddr>>, // local: addresses of a name of the program
}

/// The threads that resolve names, and their queues. When this value is dropped, each thread ends
/// after its current name.
#[derive(Debug)]
pub(super) struct Lookups {
    queries: (Sender<HostQuery>, Receiver<HostQuery>), // local: names of the program
    pub(super) answers: (Sender<HostAddresses>, Receiver<HostAddresses>), // local: names of the program
    threads: usize,
}

impl Default for Lookups {
    fn default() -> Self {
        Self { queries: unbounded(), answers: unbounded(), threads: 0 }
    }
}

impl Lookups {
    /// Starts a thread that resolves names, if fewer than [`THREADS`] run.
    pub(super) fn start_thread(&mut self, wake: &Arc<WakeFlag>) -> io::Result<()> {
        if self.threads == THREADS {
            return Ok(());
        }
        let (queries, answers, wake) = (self.queries.1.clone(), self.answers.0.clone(), Arc::clone(wake));
        let work = move || {
            for query in queries {
                let addresses = (&*query.host, query.port).to_socket_addrs().map(Iterator::collect);
                if answers.send(HostAddresses { query, addresses }).is_err() {
                    return;
                }
                wake.wake();
            }
        };
        thread::Builder::new().name("rdma-reactor-names".into()).spawn(work)?;
        self.threads += 1;
        Ok(())
    }

    /// Adds a name to the queue of the threads.
    pub(super) fn ask(&self, query: HostQuery) {
        // `send` fails only if all receivers were dropped, and `queries` owns one.
        let _ = self.queries.0.send(query);
    }
}
