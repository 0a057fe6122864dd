//! Resolves the host names of peers. `getaddrinfo`(3) blocks, so it runs on other threads.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::thread;

use crossbeam_channel::{Receiver, Sender, unbounded};
use rdma_transport::cm::{ExchangeOptions, PathOptions};

use crate::conn::state::Ending;
use crate::driver::Driver;
use crate::driver::open::fallback::{Fallback, by_turns};
use crate::driver::stages::Stages;
use crate::error::ConnectError;
use crate::id::ConnectionId;
use crate::providers::Handle;
use crate::seam::wake::WakeFlag;

/// The largest number of names that are resolved at the same time. Any further names are queued, and the connect timeout of a connection
/// includes the time that its name spends in the queue.
const THREADS: usize = 4;

/// A name to resolve, for a connection.
#[derive(Debug)]
struct HostQuery {
    of: ConnectionId,
    host: String, // local: a name of the program
    port: u16,
    path: PathOptions,
    exchange: Option<ExchangeOptions>,
}

/// The result for a name: its addresses, or an error.
#[derive(Debug)]
struct HostAddresses {
    query: HostQuery,
    addresses: io::Result<Vec<SocketAddr>>, // local: addresses of a name of the program
}

/// The threads that resolve names, and their queues. When this value is dropped, each thread ends after its current name.
#[derive(Debug)]
pub(in crate::driver) struct Lookups {
    queries: (Sender<HostQuery>, Receiver<HostQuery>), // local: names of the program
    answers: (Sender<HostAddresses>, Receiver<HostAddresses>), // local: names of the program
    threads: usize,
}

impl Default for Lookups {
    fn default() -> Self {
        Self { queries: unbounded(), answers: unbounded(), threads: 0 }
    }
}

impl Lookups {
    fn ask(&mut self, query: HostQuery, wake: &Arc<WakeFlag>) -> io::Result<()> {
        if self.threads < THREADS {
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
        }
        // `send` fails only if all receivers were dropped, and `queries` owns one.
        let _ = self.queries.0.send(query);
        Ok(())
    }
}

impl Driver {
    /// Starts to resolve the host name of a connection's peer.
    pub(in crate::driver) fn look_up(
        &mut self,
        of: ConnectionId,
        (host, port): (String, u16),
        path: PathOptions,
        exchange: Option<ExchangeOptions>,
    ) -> io::Result<()> {
        self.lookups.ask(HostQuery { of, host, port, path, exchange }, &self.os.wake)
    }

    /// Handles the names that were resolved. Connects to the addresses of each name, or ends the connection if its name has no address.
    pub(in crate::driver) fn take_lookups(&mut self) {
        while let Ok(HostAddresses { query, addresses }) = self.lookups.answers.1.try_recv() {
            let HostQuery { of, host, path, exchange, .. } = query;
            // While the name was resolved, the program may have closed the connection, or the connect timeout may have expired.
            if !self.table.get(of).is_some_and(|slot| slot.link.cm == Handle::NONE && slot.conn.state().is_handshake())
            {
                continue;
            }
            let error = match addresses {
                Err(error) => ConnectError::Lookup { host, why: error.to_string() },
                Ok(addresses) => {
                    if let Some(slot) = self.table.get_mut(of) {
                        slot.link.fallback = Some(Fallback::new(by_turns(&addresses), path, exchange));
                    }
                    if self.attempt_next(of) {
                        continue;
                    }
                    let why = format!("{host}: none of its {} addresses can be connected to", addresses.len());
                    ConnectError::Local(why)
                }
            };
            let ending = Ending::ConnectError(error);
            self.input(of, |conn, env| conn.end(ending, env));
            self.note(Stages::ENDS);
        }
    }
}
